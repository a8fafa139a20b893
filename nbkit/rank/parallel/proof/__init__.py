"""Tools for proofs about a model: they run it and restore it, track its memory, and compare tensors."""
