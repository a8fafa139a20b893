"""The output of ranks in the notebook: streamed lines, widgets, and many errors reduced to one."""
