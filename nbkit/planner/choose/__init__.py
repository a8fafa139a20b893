"""Chooses a strategy: hardware in a line, seconds and memory of each strategy, a table with its reasons."""
