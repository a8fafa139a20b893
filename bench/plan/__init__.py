"""What the planner foretells, beside what is measured: `make plan-check`."""
