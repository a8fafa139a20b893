"""The work of a rank, together with its parent, when another rank dies in a training and is replaced."""
