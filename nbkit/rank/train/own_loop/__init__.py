"""A user's own loop over `job.batches`, in which a rank that dies is replaced."""
