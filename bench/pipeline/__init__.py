"""Benchmarks that compare pipelines with the ideal: bubbles of schedules, and stages of equal cost."""
