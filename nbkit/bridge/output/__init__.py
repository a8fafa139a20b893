"""What a cell on a rank shows: marked, merged where it is fast, and sent to the page."""
