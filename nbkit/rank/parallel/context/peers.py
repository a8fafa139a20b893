"""The ranks over which positions are split: real ranks (`Peers`), or threads of one process (`Threads`).

Both have the same interface. Between threads a gather is an ordinary `torch.cat`, so one backward pass goes through all
parts. So a block can be compared with its result on all positions without a process group.

`CausalMasks` holds masks of causal attention for some of the positions. The blocks of a model share them during a pass.
A kernel keeps its mask for backward, and converts a bool mask to floats. If every block had its own mask, masks would
soon take more memory than everything else that a block keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from nbkit.rank.parallel.tensor.collectives import (
    copy_to,
    gather_from,
    gather_seq,
    reduce_scatter_seq,
    split_to,
    taken,
    together,
)
from nbkit.tensor_layout import Parting, Runs, contiguous


class CausalMasks:
    """Causal masks. Each is created once, and freed when nothing refers to it any more."""

    def __init__(self) -> None:
        self._made: dict[Any, TensorWeakRef] = {}

    def of(self, runs: Runs, query: Tensor) -> Tensor:
        """Return a mask (queries, keys): 0 where a query at the positions `runs` may attend to a key, else -inf.

        Keys go up to the last query. The mask has the dtype and device of `query`.
        """
        kind = runs, query.dtype, query.device
        made = self._made[kind]() if kind in self._made else None
        if made is None:
            rows = torch.cat([torch.arange(start, stop, device=query.device) for start, stop in runs])
            later = rows[:, None] < torch.arange(runs[-1][1], device=query.device)
            made = torch.zeros(later.shape, dtype=query.dtype, device=query.device).masked_fill_(later, -torch.inf)
            # Drop masks that were freed.
            self._made = {kind: ref for kind, ref in self._made.items() if ref() is not None}
            self._made[kind] = TensorWeakRef(made)
        return made


class Peers:
    """The ranks of a process group, with collectives that split, copy, gather and join tensors.

    parting: which positions each rank holds. A whole tensor has all positions in order. masks: see CausalMasks.
    in_one_graph: True if one graph of autograd has the parts of all ranks.
    """

    in_one_graph: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup, parting: Parting = contiguous) -> None:
        self._group, self._size, self._rank, self._parting = group, group.size(), group.rank(), parting
        self.masks = CausalMasks()

    def __str__(self) -> str:
        return f"cp={self._size}"

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return the index of this rank."""
        return self._rank

    def runs(self, total: int) -> Runs:
        """Return the positions of this rank, out of `total`."""
        return self._parting(total, self.size(), self.rank())

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Take this rank's part along `dim` (whole -> split)."""
        return split_to(x, self._group, dim, self._parting)

    def copy(self, x: Tensor) -> Tensor:
        """Return `x` (whole -> whole), before a computation that is divided over the ranks."""
        return copy_to(x, self._group)

    def gather(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Gather parts along `dim` (split -> whole), before a computation that is divided over the ranks."""
        return gather_seq(x, self._group, dim, total, self._parting)

    def reduce(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the ranks and take this rank's part along `dim` (partial -> split)."""
        return reduce_scatter_seq(x, self._group, dim, self._parting)

    def join(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Gather parts along `dim` (split -> whole), before a computation that every rank repeats."""
        return gather_from(x, self._group, dim, total, self._parting)


class Threads(Peers):
    """`size` threads of this process that act as ranks during `run`.

    All parts belong to one graph, so autograd sums their gradients, and `copy` returns its input.
    """

    in_one_graph = True

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
        """Gather parts (split -> whole) from all threads. Raises RuntimeError if a thread ends without taking part."""
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
        """Return the results of `compute` in all threads, in the order of ranks. Raises the first error of a thread."""
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
