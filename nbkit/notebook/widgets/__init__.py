"""Widgets. Plain functions, which do not depend on widgets, compute their content."""
