"""A prompt in the notebook on a rank: `breakpoint()` in a cell, and the frames of a cell that has failed."""
