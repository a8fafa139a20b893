"""A step of a training: gradients, clipping, the optimizer's update, and the record of it."""
