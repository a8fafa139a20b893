"""Functions for the cells of `nbkit selftest`: compare a small job with one process, and time a larger job."""
