"""The records that a training leaves on disk, how they are read, and what is computed from them."""
