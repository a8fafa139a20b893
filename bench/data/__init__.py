"""Reading data: how much of it is hidden behind steps."""
