"""Checkpoints that are written under one strategy and read under any other."""
