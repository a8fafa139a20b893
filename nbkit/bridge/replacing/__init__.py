"""What a rank does with its parent when another rank dies in a training and is replaced."""
