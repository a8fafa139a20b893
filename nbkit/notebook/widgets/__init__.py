"""Widgets. What they show is computed by plain functions that do not depend on widgets."""
