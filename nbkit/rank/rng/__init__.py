"""Random numbers that are the same under every strategy: seeds of a step, and masks of dropout."""
