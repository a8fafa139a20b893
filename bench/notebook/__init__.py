"""Benchmarks of what a notebook user waits for: cells, output, start, transfer, recovery, a click, the dashboard."""
