"""What a training leaves on disk and what is read from it: the records of every rank, and what they say."""
