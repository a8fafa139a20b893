"""What a checkpoint costs the training that it is taken of."""
