"""Cells: how they are sent to the ranks, watched, shown and stopped."""
