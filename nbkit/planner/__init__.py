"""Computes the time, the memory and the traffic of a strategy by arithmetic, before it runs."""
