"""Tensors cut along dim 0 over ranks, in a matrix with one row per rank: what a reduce-scatter or all-gather moves.

Row r holds what rank r keeps of each tensor, one behind the other. Every tensor starts in the same column of every row,
so a tensor whose dim 0 the ranks do not divide wastes one of its rows on those that hold one less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from nbkit.tensor_layout import bounds


@dataclass(frozen=True)
class Packing:
    """Of tensors of `shapes` over `ranks`; 0-dimensional ones are held by every rank. starts: their first columns."""

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    starts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], ranks: int) -> Packing:
        """One tensor behind the other."""
        tidy = tuple(tuple(shape) for shape in shapes)
        widths = [-(-shape[0] // ranks) * prod(shape[1:]) if shape else 1 for shape in tidy]
        *starts, width = accumulate(widths, initial=0)
        return cls(tidy, ranks, tuple(starts), width)

    def rows(self, i: int, rank: int) -> slice:
        """Along dim 0 of tensor `i`: what `rank` holds. Of a 0-dimensional one there is no such thing."""
        return slice(*bounds(self.shapes[i][0], self.ranks, rank))

    def shard(self, row: Tensor, i: int, rank: int) -> Tensor:
        """What `rank` holds of tensor `i`, seen in its row."""
        shape = self.shapes[i]
        if shape:
            start, stop = bounds(shape[0], self.ranks, rank)
            shape = (stop - start, *shape[1:])
        return row[self.starts[i] : self.starts[i] + prod(shape)].view(shape)

    def columns(self, matrix: Tensor, i: int) -> Tensor:
        """All of tensor `i`, padding included."""
        return matrix[:, self.starts[i] : (*self.starts, self.width)[i + 1]]

    @torch.no_grad()
    def pack(self, matrix: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Put the tensors into the matrix; what is None becomes zeros. The padding stays as it is."""
        pairs = []
        for i, tensor in enumerate(tensors):
            if tensor is None:
                self.columns(matrix, i).zero_()
            elif not self.shapes[i]:
                self.columns(matrix, i).fill_(tensor)
            else:
                pairs += self._pairs(matrix, i, tensor.reshape(-1))
        if pairs:
            torch._foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])

    @torch.no_grad()
    def unpack(self, matrix: Tensor, flats: Sequence[Tensor]) -> None:
        """Fill the tensors, each given flat, from the matrix."""
        pairs = []
        for i, flat in enumerate(flats):
            if self.shapes[i]:
                pairs += self._pairs(matrix, i, flat)
            else:
                pairs.append((matrix[0, self.starts[i] : self.starts[i] + 1], flat))
        if pairs:
            torch._foreach_copy_([here for _, here in pairs], [there for there, _ in pairs])

    def _pairs(self, matrix: Tensor, i: int, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same elements in the matrix and in the tensor: of ranks that hold one more, of the others."""
        each, extra = divmod(self.shapes[i][0], self.ranks)
        size = prod(self.shapes[i][1:])
        start, pairs, at = self.starts[i], [], 0
        for first, last, length in ((0, extra, (each + 1) * size), (extra, self.ranks, each * size)):
            if total := (last - first) * length:
                block = flat[at : at + total].view(last - first, length)
                pairs.append((matrix[first:last, start : start + length], block))
                at += total
        return pairs
