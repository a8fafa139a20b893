"""Context parallelism: positions split over ranks, and the run that shows whether a model allows it."""
