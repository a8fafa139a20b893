"""Checks of the planner's predictions against measurements: `make plan-check`."""
