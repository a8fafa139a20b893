"""A loss over rows: how much each row weighs, and whether it is the mean that splitting rows needs."""
