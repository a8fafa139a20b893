"""Replace a rank that dies in a training: what the others hold for it, and how a new one takes its place."""
