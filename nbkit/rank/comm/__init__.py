"""Process groups that nbkit can replace and observe, and collectives that a backend lacks."""
