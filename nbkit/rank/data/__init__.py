"""What a training reads: batches, their sizes, and the position in the data."""
