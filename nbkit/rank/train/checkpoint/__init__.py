"""Write checkpoints under one strategy, and read them under any other."""
