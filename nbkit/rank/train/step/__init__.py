"""Make a step of a training: gradients, clipping, the optimizer's update, and its record."""
