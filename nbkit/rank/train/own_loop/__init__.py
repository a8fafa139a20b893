"""A user's own loop over `job.batches`, which is saved and ends when a rank dies."""
