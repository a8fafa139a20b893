"""Data with unequal samples: gives every rank the same cost at every step, and packs documents into blocks."""
