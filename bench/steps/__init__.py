"""Benchmarks of a training step, its memory and its bytes, compared with torchrun and torch's own pieces."""
