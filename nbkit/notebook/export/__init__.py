"""Export a notebook's cells as a script for torchrun: read the notebook, write the script."""
