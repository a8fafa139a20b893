"""Strategies applied to a model."""
