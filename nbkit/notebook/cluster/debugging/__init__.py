"""Prompts in the notebook of ranks that stand in a breakpoint or at a failure."""
