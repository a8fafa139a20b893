"""`nbkit selftest`: what is tried on a cluster of this machine, and the report of it."""
