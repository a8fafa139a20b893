"""Benchmarks of telemetry: its cost, and whether its figures are right."""
