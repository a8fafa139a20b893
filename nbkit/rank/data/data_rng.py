"""Seeds the generators of torch, numpy and Python for reading data, and checks that ranks hold equal data."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.data.batch import fingerprint
from nbkit.rank.rng.host_generators import numpy_random, seed_others
from nbkit.rank.rng.seeding import mixed, seed_step
from nbkit.wire.cells import ranks_text

_SEED = "seed the code that makes or splits the data, with one seed on all ranks: torch.manual_seed(0)"


def seed(of_job: int, step: int, rank: int) -> None:
    """Seed all generators for reading one step's data on one rank. of_job: the seed of the job."""
    seed_step(of_job, step, rank)
    seed_others(mixed(of_job, step, rank))


def seed_host(of_job: int, step: int, rank: int) -> None:
    """Seed a process that reads for the rank, without a GPU. It then draws the same numbers as the rank would."""
    torch.default_generator.manual_seed(mixed(of_job, step, rank))
    seed_others(mixed(of_job, step, rank))


@contextmanager
def own_draws() -> Iterator[None]:
    """Restore the states of numpy's and Python's generators on exit. Use it around a training, which seeds them."""
    generator, python = numpy_random(), random.getstate()
    numpy = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if generator is not None:
            generator.set_state(numpy)


@contextmanager
def alike() -> Iterator[None]:
    """Make torch on the CPU, numpy and Python draw the same on every rank, and restore them on exit."""
    with own_draws(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        seed_others(0)
        yield


def content(read: Callable[[], Any]) -> int:
    """Return a checksum of the two samples that `read` returns, by which ranks check that they hold the same data.

    Data made of unseeded random numbers differs between ranks. Data that draws while it is read does not differ,
    because all ranks read it under the same seeds. The samples are read twice. If the readings differ, or if one fails,
    the result is 0, which means that the data cannot be compared.
    """
    found = []
    for _ in range(2):
        with suppress(Exception), alike():
            # Errors are ignored here: the rank that trains on the data reports them in full.
            found.append(fingerprint(read(), 2))
    return found[0] if len(found) == 2 and found[0] == found[1] else 0


class Compared:
    """Compares the data of all ranks by their checksums (see `content`), and warns if it differs. Collective."""

    def __init__(self, own: int) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        found = [own]
        if self.world_size > 1:
            found = [0] * self.world_size
            dist.all_gather_object(found, own)
        self.others = [rank for rank, value in enumerate(found) if value != found[0]]
        if self.others:
            warnings.warn(f"{self._what()} Each rank trains on its own rows; {_SEED}", stacklevel=5)

    def check(self, replicas: int) -> None:
        """Raise TrainingError if several ranks work on the same rows but hold different data.

        replicas: number of replicas of the model.
        """
        if self.others and replicas < self.world_size:
            ranks = f"{self.world_size} ranks, {self.world_size // replicas} of them work on each row together"
            raise TrainingError(self._what(), numbers=ranks, hint=_SEED)

    def _what(self) -> str:
        many = len(self.others) > 1
        which = f"Ranks {ranks_text(self.others)} hold" if many else f"Rank {self.others[0]} holds"
        return f"{which} different data than rank 0: the first or the last sample differs."
