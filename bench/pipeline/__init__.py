"""Benchmarks of pipelines beside their ideal: bubbles of schedules, and stages of equal cost."""
