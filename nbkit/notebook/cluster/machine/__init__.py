"""The devices of this machine, read once, and what they mean for a cluster."""
