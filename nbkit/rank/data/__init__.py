"""Training data: batches, their sizes, and the position in the data."""
