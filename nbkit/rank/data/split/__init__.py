"""Iterable data in shards. Each data-parallel rank reads some of the shards, and the global batches do not change."""
