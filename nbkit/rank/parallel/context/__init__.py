"""Context parallelism: positions are split over ranks, after a run has shown that the model allows it."""
