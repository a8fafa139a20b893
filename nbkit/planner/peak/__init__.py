"""Bytes that a rank holds at the highest moment of a step, with activations."""
