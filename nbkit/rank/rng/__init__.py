"""Random numbers that are the same under every strategy: seeds for each step, dropout masks, and other draws."""
