"""A rank that dies in a training is replaced: what the others hold for it, and how a new one takes its place."""
