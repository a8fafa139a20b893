"""Clusters on several hosts: how agents get there, and how they and the notebook find each other."""
