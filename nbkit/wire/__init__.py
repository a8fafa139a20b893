"""What travels between the notebook and the ranks: cells, values, calls by name, and processes by a sure name."""
