"""Benchmarks of overlap: how much of the communication runs while ranks compute."""
