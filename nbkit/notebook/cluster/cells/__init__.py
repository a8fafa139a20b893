"""A cell on its way to the ranks and back: sent, watched, shown, stopped."""
