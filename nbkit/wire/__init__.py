"""What the notebook and the ranks share: cells, values and calls that travel between them; processes; nvidia-smi."""
