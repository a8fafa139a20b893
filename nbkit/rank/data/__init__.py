"""Training data: batches, batch sizes, and the position in the data."""
