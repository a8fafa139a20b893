"""Proof by running that a split is right: the model once, watched; then its modules in parts beside the whole."""
