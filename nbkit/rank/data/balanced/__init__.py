"""Data whose samples are unequal: the same cost on every rank at every step, and documents packed into blocks."""
