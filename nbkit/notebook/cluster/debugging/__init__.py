"""Prompts in the notebook for ranks at a breakpoint or after a failure."""
