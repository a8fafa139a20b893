"""A step that runs out of memory is taken back on all ranks, and the training goes on with a setting that fits."""
