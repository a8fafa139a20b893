"""The output of a cell on a rank: marked with its cell, merged where it comes fast, and sent to the page."""
