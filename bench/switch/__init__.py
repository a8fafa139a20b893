"""Benchmarks of a switch: seconds, bytes, memory, and how well they were predicted."""
