"""Undo a step that ran out of memory, on all ranks, and continue the training with a setting that fits."""
