"""The output of ranks in the notebook: streamed lines, widgets, and one error for all ranks."""
