"""Loops that users write over `job.batches`: their own forwards and losses, what is refused, and a rank that dies."""
