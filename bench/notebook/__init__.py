"""Benchmarks of the waits of a notebook user: cells, output, start, transfer, recovery, a click, the dashboard."""
