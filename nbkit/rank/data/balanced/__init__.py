"""Data with unequal samples: equal cost on every rank at every step, and documents packed into blocks."""
