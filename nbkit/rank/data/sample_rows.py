"""Reads some rows of the data, with which a job is checked before its first step."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import on_device, pick, rows_of, shapes_of
from nbkit.rank.data.split.data_shards import data_shards
from nbkit.rank.data.stream import is_map_style
from nbkit.rank.loss.output_tensors import leaves

Collate = Callable[[list[Any]], Any]

_ROWS, _SECONDS = 64, 0.25  # the maximum to read; but at least four rows are read
_OF_SHARD = 8


@dataclass(frozen=True)
class Sample:
    """Rows of the data. batch: all rows, collated. samples, collate: what `batch` was made from, if that is known."""

    batch: Any
    samples: Sequence[Any] = ()
    collate: Collate | None = None

    @cached_property
    def rows(self) -> int:
        """Return the number of rows of the batch."""
        return rows_of(self.batch)

    @cached_property
    def is_padded(self) -> bool:
        """Return True if fewer rows are collated to other shapes, as with padding to the longest row.

        If collate draws random numbers, return False.
        """
        if self.collate is None:
            return False
        one, again = self.collate([self.samples[0]]), self.collate([self.samples[0]])
        alone = [shapes_of(one)] + [shapes_of(self.collate([sample])) for sample in self.samples[1:8]]
        pairs = zip(leaves(one).values(), leaves(again).values(), strict=True)
        return len(set(alone)) > 1 and all(torch.equal(a, b) for a, b in pairs)

    @cached_property
    def has_only_rows(self) -> bool:
        """Return False if the batch has an entry for all rows together, such as the number of its tokens."""
        try:
            pick(self.batch, [0], rows=self.rows)
        except TrainingError:
            return False
        return True

    def part(self, numbers: Sequence[int], device: torch.device) -> Any:
        """Return the batch of a rank that gets only the rows `numbers`."""
        if self.collate is not None and (self.is_padded or not self.has_only_rows):
            return on_device(self.collate([self.samples[i] for i in numbers]), device)
        return on_device(pick(self.batch, numbers, rows=self.rows), device)


def sample_of(data: Any, collate: Collate) -> Sample | None:
    """Return rows spread over map-style `data`, or the first rows of data in shards; None if there are none."""
    if (shards := data_shards(data)) is not None and not hasattr(data, "__getitem__"):
        first = shards.first_samples(_OF_SHARD).samples
        return Sample(collate(first), first, collate) if first else None
    began, step = time.perf_counter(), max(len(data) // _ROWS, 1)
    samples: list[Any] = []
    for i in dict.fromkeys([*range(min(2, len(data))), *range(0, len(data), step)]):
        if len(samples) >= _ROWS or (len(samples) >= 4 and time.perf_counter() - began > _SECONDS):
            break
        samples.append(data[i])
    return Sample(collate(samples), samples, collate) if samples else None


def warn_of_collate(data: Any, collate: Collate) -> None:
    """Warn if collating on several ranks gives other rows than on one rank. Reads two samples of map-style data."""
    if collate is default_collate or not is_map_style(data) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    remark = ""
    # Ignore errors here, because reading the data for training reports them in full.
    with suppress(Exception), undrawn():
        remark = _collate_remark([data[0], data[1]], collate) if len(data) > 1 else ""
    if remark:
        warnings.warn(remark, stacklevel=4)


def _collate_remark(samples: Sequence[Any], collate: Collate) -> str:
    """Return why batches depend on the number of ranks, since each rank collates its own rows; "" if they do not."""
    before = _drawn()
    together = collate(list(samples))
    if _drawn() != before:
        return "collate= draws random numbers on each rank for its own rows, so the batches change with dp"
    for i, sample in enumerate(samples):
        beside, alone = leaves(pick(together, [i], rows=len(samples))), leaves(collate([sample]))
        pairs = [(beside[name], alone[name]) for name in beside.keys() & alone.keys()]
        if any(a.shape == b.shape and not torch.equal(a, b) for a, b in pairs):
            return "collate= mixes rows, and each rank collates only its own rows, so the batches change with dp"
    return ""


def _drawn() -> tuple[bytes, Any, str]:
    """Return a value that changes when torch, Python or numpy draws."""
    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(numpy and numpy.random.get_state())


@contextmanager
def undrawn() -> Iterator[None]:
    """Restore all generators on exit, so that a check that reads samples does not change the draws of the training."""
    numpy: Any = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn[0])
        if numpy is not None:
            numpy.random.set_state(drawn[1])
