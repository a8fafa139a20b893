"""A debugger prompt on a rank: for `breakpoint()` in a cell, and for the frames of a cell that has failed."""
