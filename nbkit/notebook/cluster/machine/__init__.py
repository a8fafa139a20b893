"""What this machine has to compute on, read once, and what that means for a cluster."""
