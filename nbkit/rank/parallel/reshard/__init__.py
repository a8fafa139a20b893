"""Data movement of a switch: each rank gets the parts of tensors that it lacks."""
