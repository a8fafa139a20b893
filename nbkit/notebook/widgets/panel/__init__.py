"""The strategy panel: what it knows, what it shows, and what a click requests."""
