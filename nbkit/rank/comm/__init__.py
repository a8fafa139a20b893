"""Process groups that nbkit can replace and listen to, and the collectives that a backend lacks."""
