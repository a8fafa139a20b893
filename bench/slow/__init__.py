"""Links and ranks that are slow, and what is done about them."""
