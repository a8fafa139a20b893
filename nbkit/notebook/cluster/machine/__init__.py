"""The devices of this machine, and remarks about their use for a cluster."""
