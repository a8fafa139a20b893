"""Support loops that users write over `job.batches`: own forwards and losses, refused uses, and the death of a rank."""
