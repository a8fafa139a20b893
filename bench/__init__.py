"""Benchmarks that compare nbkit with its peers: `python -m bench` runs them. They are not in the package."""
