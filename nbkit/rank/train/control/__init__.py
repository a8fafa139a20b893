"""Control a training from outside: requests at step boundaries, pauses, and recovery after an interrupted step."""
