"""Runs a model on tensors without memory, to count what it holds and does."""
