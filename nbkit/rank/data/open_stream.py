"""Chooses the stream that reads the user's data, and makes one pass over data for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.balanced import Balanced
from nbkit.rank.data.balanced.balanced_stream import BalancedStream
from nbkit.rank.data.batch import Shard, bounds
from nbkit.rank.data.split.data_shards import data_shards
from nbkit.rank.data.split.split_stream import Course, ShardReader, SplitStream
from nbkit.rank.data.stream import Collate, IterableStream, MapStream, Stream, fetched, is_map_style


def open_stream(data: Any, *, gather: Callable[[Any], list[Any]] = lambda own: [own], **how: Any) -> Stream:
    """Return the stream for this kind of `data`. Raises TrainingError if it is neither map-style nor iterable.

    how: arguments of Stream. gather: returns the values of all ranks, by rank; collective over all ranks.
    """
    refuse_loader(data)
    if isinstance(data, Balanced):
        return BalancedStream(data, gather=gather, **how)
    if is_map_style(data):
        return MapStream(data, **how)
    if not isinstance(data, Iterable):
        raise TrainingError(
            "The data is neither map-style nor iterable.",
            numbers=f"{type(data).__name__}: __len__ {hasattr(data, '__len__')}, "
            f"__getitem__ {hasattr(data, '__getitem__')}, __iter__ {hasattr(data, '__iter__')}",
            hint="data=dataset with __len__ and __getitem__, or with __iter__",
        )
    if (split := data_shards(data)) is not None:
        stream = SplitStream(data, shards=split, gather=gather, **how)
        if split.counted or stream.takes_part:
            return stream
    return IterableStream(data, **how)


def shards(data: Any, *, batch_size: int, rank: int, ranks: int, collate: Collate) -> Iterator[Shard]:
    """Yield this rank's shards of one pass over `data` in the data's own order. Each sample comes exactly once."""
    refuse_loader(data)
    if is_map_style(data):
        for first in range(0, len(data), batch_size):
            total = min(batch_size, len(data) - first)
            yield fetched(data, list(range(first, first + total)), range(*bounds(total, ranks, rank)), collate)
        return
    read, first = _reads(data), 0
    while taken := read(batch_size):
        start, stop = bounds(len(taken), ranks, rank)
        rows = collate(taken[start:stop]) if stop > start else None
        yield Shard(rows, stop - start, len(taken), range(first, first + len(taken)))
        first += len(taken)


def _reads(data: Any) -> Callable[[int], list[Any]]:
    """Return a function that reads the next `count` samples of iterable data, in the data's own order."""
    split = data_shards(data)
    if split is not None and split.first_samples(1).takes_part:  # read directly, the data would take a rank's part
        return ShardReader(Course(split, readers=1, epoch=0, seed=0), 0).read
    samples = iter(data)
    return lambda count: list(islice(samples, count))


def refuse_loader(data: Any) -> None:
    """Raise TrainingError if `data` is a DataLoader, because it yields batches and not samples."""
    if isinstance(data, torch.utils.data.DataLoader):
        raise TrainingError(
            "The data is a DataLoader: its items are batches, not samples.",
            numbers=f"its batch_size {data.batch_size}",
            hint="data=loader.dataset, with batch_size= and loading=nbkit.Loading(collate=...); or "
            "nbkit.prepare(...) and job.batches(loader)",
        )
