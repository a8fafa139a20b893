"""Widgets: what they show is computed by plain functions, which know no widget."""
