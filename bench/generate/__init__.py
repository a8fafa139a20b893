"""Generating: beside plain Hugging Face on one rank, and several texts at once in a pipeline beside one at a time."""
