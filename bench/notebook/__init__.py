"""Waits of a notebook user, measured: cells, output, start, transfer, recovery, a click, the dashboard."""
