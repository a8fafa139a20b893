"""The number of ranks of a training changes while it lives."""
