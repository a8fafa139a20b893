"""A notebook's cells as a script for torchrun: what is read of the notebook, and what is written of it."""
