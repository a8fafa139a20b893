"""The bridge between Jupyter and the training code of a rank: it runs cells and answers requests."""
