"""What a change of strategy costs: seconds, bytes, memory, and what was foretold of it."""
