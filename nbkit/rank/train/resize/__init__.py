"""Change the number of ranks of a running training."""
