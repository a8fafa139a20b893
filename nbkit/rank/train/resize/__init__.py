"""Change the number of ranks of a training while it lives."""
