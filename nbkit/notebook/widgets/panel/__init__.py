"""The strategy panel: its state, its views, and the requests that a click makes."""
