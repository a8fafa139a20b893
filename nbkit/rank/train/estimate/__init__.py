"""What a strategy would cost a training before it runs: memory, bytes, seconds."""
