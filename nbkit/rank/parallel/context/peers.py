"""The ranks among which positions are spread: real ones, and ones that threads of one process stand for.

Both offer what context parallelism asks of them. Between threads a gather is an ordinary `torch.cat`, so that one
backward pass goes through all parts: a block can be compared with what it computes whole, without a process group.

Masks of causal attention from some of the positions, which the blocks of a model share while a pass needs them.

A kernel keeps for backward the mask it was given, and makes one of floats of what is bool: a mask for each block would
soon be larger than all else that a block keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from nbkit.rank.parallel.tensor.collectives import copy_to, gather_from, gather_seq, split_to, taken, together
from nbkit.tensor_layout import Parting, Runs, contiguous


class CausalMasks:
    """Each is made once, and gone when nothing holds it any more."""

    def __init__(self) -> None:
        self._made: dict[Any, TensorWeakRef] = {}

    def of(self, runs: Runs, query: Tensor) -> Tensor:
        """(queries, keys): 0 where a query at the positions `runs` may look at a key, -inf where not.

        Keys are those up to the last query; dtype and device are those of `query`.
        """
        kind = runs, query.dtype, query.device
        made = self._made[kind]() if kind in self._made else None
        if made is None:
            rows = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in runs])
            later = rows[:, None] < torch.arange(runs[-1][1], device=query.device)
            made = torch.zeros(later.shape, dtype=query.dtype, device=query.device).masked_fill_(later, -torch.inf)
            # Those of other lengths are not needed again.
            self._made = {kind: ref for kind, ref in self._made.items() if ref() is not None}
            self._made[kind] = TensorWeakRef(made)
        return made


class Peers:
    """The ranks of a process group; a tensor is split, copied, gathered and joined along the dim given.

    parting: which positions each of them holds. What is whole has all in their own order. masks: see CausalMasks.
    """

    def __init__(self, group: dist.ProcessGroup, parting: Parting = contiguous) -> None:
        self._group, self._size, self._rank, self._parting = group, group.size(), group.rank(), parting
        self.masks = CausalMasks()

    def __str__(self) -> str:
        return f"cp={self._size}"

    def size(self) -> int:
        """Return how many they are."""
        return self._size

    def rank(self) -> int:
        """Return which of them this one is."""
        return self._rank

    def runs(self, total: int) -> Runs:
        """Return the positions of this rank, of so many."""
        return self._parting(total, self.size(), self.rank())

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Whole -> this rank's part."""
        return split_to(x, self._group, dim, self._parting)

    def copy(self, x: Tensor) -> Tensor:
        """Whole -> whole, of which every rank uses something."""
        return copy_to(x, self._group)

    def gather(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Parts -> whole, of which every rank uses something else."""
        return gather_seq(x, self._group, dim, total, self._parting)

    def join(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Parts -> whole, with which every rank does the same."""
        return gather_from(x, self._group, dim, total, self._parting)


class Threads(Peers):
    """`size` threads of this process, each for a rank, while `run` runs.

    A part is a part of the same tensor: gradients meet there, and what is copied is as it is.
    """

    def __init__(self, size: int, parting: Parting = contiguous) -> None:
        self._size, self._parting = size, parting
        self._here, self._news, self.masks = threading.local(), threading.Condition(), CausalMasks()
        self._offers: dict[int, dict[int, Tensor]] = {}
        self._gone: set[int] = set()

    def __str__(self) -> str:
        return f"{self._size} parts"

    def rank(self) -> int:
        number: int = self._here.rank
        return number

    def split(self, x: Tensor, dim: int) -> Tensor:
        return taken(x, dim, self.runs(x.shape[dim])).clone(memory_format=torch.contiguous_format)

    def copy(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Parts -> whole; every thread waits for all of them. Raises RuntimeError where one has gone without."""
        self._here.gathers += 1
        with self._news:
            offers = self._offers.setdefault(self._here.gathers, {})
            offers[self.rank()] = x
            self._news.notify_all()
            self._news.wait_for(lambda: len(offers) == self._size or self._gone - offers.keys())
        if len(offers) < self._size:
            raise RuntimeError("the parts do not attend equally often")
        return together([offers[rank] for rank in range(self._size)], dim, total, self._parting)

    join = gather  # type: ignore[assignment]

    def run(self, compute: Callable[[], Any]) -> list[Any]:
        """Return what `compute` gives in each thread, in the order of ranks. Raises what the first one to fail
        raised."""
        results: list[Any] = [None] * self._size
        errors: list[BaseException] = []
        grads = torch.is_grad_enabled()
        self._offers, self._gone = {}, set()

        def be(rank: int) -> None:
            self._here.rank, self._here.gathers = rank, 0
            try:
                with torch.set_grad_enabled(grads):
                    results[rank] = compute()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._news:
                    self._gone.add(rank)
                    self._news.notify_all()

        threads = [threading.Thread(target=copy_context().run, args=(be, rank)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._offers = {}
        if errors:
            raise errors[0]
        return results
