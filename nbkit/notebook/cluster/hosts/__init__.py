"""Clusters on several hosts: start an agent on each host, and connect agents and notebook."""
