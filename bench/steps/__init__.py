"""Benchmarks of a training step, its memory and its bytes, beside torchrun and torch's own pieces."""
