"""Published steps of large models, beside the planner's predictions."""
