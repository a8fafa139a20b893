"""The bridge: the one package on an engine that knows Jupyter."""
