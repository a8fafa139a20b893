"""What the planner predicts, beside what is measured: `make plan-check`."""
