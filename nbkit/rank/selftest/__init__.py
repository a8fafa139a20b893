"""Functions that the cells of `nbkit selftest` call: a small job beside one process, and the pace of a larger one."""
