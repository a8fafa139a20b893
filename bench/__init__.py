"""Benchmarks of nbkit beside its peers: `python -m bench` runs them. They are not shipped with the package."""
