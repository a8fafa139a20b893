"""Shared by notebook and ranks: cells, values and calls that travel between them; processes; nvidia-smi."""
