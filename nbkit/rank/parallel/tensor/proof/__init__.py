"""Proof that a split is correct: run the model once and watch it, then run its modules in parts and compare."""
