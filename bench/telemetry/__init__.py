"""Benchmarks of telemetry: its cost, and whether what it says is true."""
