"""The ways in which a rank differs from a plain process, for the programs that run on it."""
