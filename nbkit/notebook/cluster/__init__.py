"""The cluster: launch, pin, attach, stop; cells and their output; push and pull."""
