"""Losses over rows: the weight of each row, and checks that the loss is a mean, so that rows can be split."""
