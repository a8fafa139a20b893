"""Data of a training: batches, their sizes, and the position in the data."""
