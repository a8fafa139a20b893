"""Estimate the cost of a strategy before it runs: memory, bytes sent and seconds."""
