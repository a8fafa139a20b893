"""Small models of every kind, for the tests and for `python -m verify`."""
