"""Acts on a training from outside: requests at step boundaries, pauses, and recovery after a broken step."""
