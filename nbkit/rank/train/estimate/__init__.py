"""Estimate the cost of a strategy for a training before it runs: memory, bytes, seconds."""
