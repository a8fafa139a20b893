"""Tools of every proof about a model: they run it and leave it as it was, follow its memory, compare tensors."""
