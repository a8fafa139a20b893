"""Change the strategy of a running training, from the request to the proof that no bit of its state has changed."""
