"""Change the strategy of a live training, from the request to the proof that no bit has changed."""
