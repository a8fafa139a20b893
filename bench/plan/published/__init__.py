"""Published steps of large models, compared with the planner's predictions."""
