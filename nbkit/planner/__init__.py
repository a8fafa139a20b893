"""Computes the costs of a strategy, by arithmetic, before it runs."""
