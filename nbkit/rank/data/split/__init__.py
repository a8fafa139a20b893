"""Iterable data that comes in shards: each data-parallel rank reads some of them, and the global batches stay."""
