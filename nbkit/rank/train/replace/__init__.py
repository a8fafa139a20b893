"""Replace a rank that dies in a training by a new process, from the state that the other ranks keep."""
