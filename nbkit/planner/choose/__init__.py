"""Chooses a strategy for hardware that one line describes: predicts time and memory of each one, and gives reasons."""
