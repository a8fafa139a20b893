"""Random numbers that are the same under every strategy: seeds of a step, and dropout masks."""
