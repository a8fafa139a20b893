"""Published steps of large models, and what the planner says of them."""
