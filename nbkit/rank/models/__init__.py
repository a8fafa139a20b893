"""A small GPT and real text to train it on."""
