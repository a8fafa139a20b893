"""A loop of the user's own over `job.batches`, in which a rank that dies is replaced."""
