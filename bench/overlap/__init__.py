"""Sending: how much of it is hidden behind computing."""
