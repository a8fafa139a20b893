"""Iterable data in shards: each data-parallel rank reads some of them, and the global batches do not change."""
