"""Prompts in the notebook for ranks that stand at a breakpoint or a failure."""
