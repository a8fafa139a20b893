"""The plan of a change of layout: who sends which boxes of which tensors to whom, in which order."""
