"""Tensors cut along dim 0 over ranks, in a matrix with one row per rank: what a reduce-scatter or all-gather moves.

Row r holds what rank r keeps of each tensor, one behind the other. Every tensor starts in the same column of every row,
so a tensor whose dim 0 the ranks do not divide wastes one of its rows on those that hold one less. Those that they
divide come first, so that a device moves all of them with one kernel.

NCCL, and kernels that read several elements at once, are slow where memory is not aligned. A large part of a tensor
begins at a multiple of 128 bytes, as rows do; a small one, of which so much padding would be more than a hundredth, at
a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from nbkit.rank.torch_private import foreach_copy_
from nbkit.tensor_layout import bounds

_BYTES, _BYTES_SMALL, _LARGE = 128, 16, 128 * 100


def aligned(num: int, like: Tensor, num_bytes: int = _BYTES) -> int:
    """`num` elements as `like` has them, and as many more as reach up to a multiple of `num_bytes`."""
    step = max(num_bytes // like.element_size(), 1)
    return -(-num // step) * step


def flat_with_views(shapes: Sequence[Sequence[int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(memory for tensors of `shapes`, zeros; each of them in it, flat and aligned)."""
    sizes = [prod(shape) for shape in shapes]
    pieces = like.new_zeros(sum(aligned(size, like) for size in sizes))
    views = pieces.split([aligned(size, like) for size in sizes])
    return pieces, [view[:size] for view, size in zip(views, sizes, strict=True)]


@dataclass(frozen=True)
class Packing:
    """Of tensors of `shapes` over `ranks`; 0-dimensional ones are held by every rank.

    starts, widths: first column of each, and how many it has. width: columns of all, and of what is free between them.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    starts: tuple[int, ...]
    widths: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], ranks: int, like: Tensor) -> Packing:
        """Those that the ranks divide, then the others. like: what says how large an element is."""
        tidy = tuple(tuple(shape) for shape in shapes)
        widths = tuple(-(-shape[0] // ranks) * prod(shape[1:]) if shape else 1 for shape in tidy)
        starts, width = [0] * len(tidy), 0
        for i in sorted(range(len(tidy)), key=lambda i: not _divides(ranks, tidy[i])):
            large = widths[i] * like.element_size() >= _LARGE
            starts[i] = aligned(width, like, _BYTES if large else _BYTES_SMALL)
            width = starts[i] + widths[i]
        return cls(tidy, ranks, tuple(starts), widths, width)

    def rows(self, i: int, rank: int) -> slice:
        """Along dim 0 of tensor `i`: what `rank` holds. Of a 0-dimensional one there is no such thing."""
        return slice(*bounds(self.shapes[i][0], self.ranks, rank))

    def shard(self, row: Tensor, i: int, rank: int) -> Tensor:
        """What `rank` holds of tensor `i`, seen in its row."""
        shape = self._shape(i, rank)
        return row[self.starts[i] : self.starts[i] + prod(shape)].view(shape)

    def shards(self, row: Tensor, rank: int) -> list[Tensor]:
        """What `rank` holds of each tensor, seen in its row."""
        sizes, shapes = self._cuts.get(rank) or self._cuts.setdefault(rank, self._cut(rank))
        pieces = row.split_with_sizes([*sizes, row.numel() - sum(sizes)])
        return [pieces[at].view(shape) for at, shape in shapes]

    def _shape(self, i: int, rank: int) -> tuple[int, ...]:
        shape = self.shapes[i]
        if not shape:
            return shape
        start, stop = bounds(shape[0], self.ranks, rank)
        return (stop - start, *shape[1:])

    @cached_property
    def _cuts(self) -> dict[int, tuple[list[int], list[tuple[int, tuple[int, ...]]]]]:
        """By rank: sizes of the pieces of its row, what is free between them too, and (piece, shape) of each tensor."""
        return {}

    def _cut(self, rank: int) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
        sizes: list[int] = []
        shapes: dict[int, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for i in sorted(range(len(self.shapes)), key=lambda i: (self.starts[i], self.widths[i])):
            shape = self._shape(i, rank)
            shapes[i] = len(sizes) + 1, shape
            sizes += [self.starts[i] - end, prod(shape)]
            end = self.starts[i] + prod(shape)
        return sizes, [shapes[i] for i in range(len(self.shapes))]

    @torch.no_grad()
    def pack(self, matrix: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Put the tensors into the matrix; what is None becomes zeros. The padding of uneven ones stays as it is."""
        even, end = self._even
        if even:
            pieces = []
            for i, n in even:
                tensor = None if i is None else tensors[i]
                if tensor is not None:
                    pieces.append(tensor.reshape(self.ranks, n))
                else:  # nobody reads what is free between two tensors
                    pieces.append(matrix.new_empty(self.ranks, n) if i is None else matrix.new_zeros(self.ranks, n))
            torch.cat(pieces, dim=1, out=matrix[:, :end])
        pairs = []
        for i in self._uneven:
            tensor, columns = tensors[i], matrix[:, self.starts[i] : self.starts[i] + self.widths[i]]
            if tensor is None:
                columns.zero_()
            elif not self.shapes[i]:
                columns.fill_(tensor)
            else:
                pairs += self._pairs(matrix, i, tensor.reshape(-1))
        if pairs:
            foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])

    @torch.no_grad()
    def unpack(self, matrix: Tensor, flats: Sequence[Tensor]) -> None:
        """Fill the tensors, each given flat, from the matrix."""
        even, end = self._even
        if even:
            out = [matrix.new_empty(self.ranks, n) if i is None else flats[i].view(self.ranks, n) for i, n in even]
            torch.split_with_sizes_copy(matrix[:, :end], [n for _, n in even], dim=1, out=out)
        pairs = []
        for i in self._uneven:
            if self.shapes[i]:
                pairs += self._pairs(matrix, i, flats[i])
            else:
                pairs.append((matrix[0, self.starts[i] : self.starts[i] + 1], flats[i]))
        if pairs:
            foreach_copy_([here for _, here in pairs], [there for there, _ in pairs])

    @cached_property
    def _even(self) -> tuple[list[tuple[int | None, int]], int]:
        """(the tensors that the ranks divide, and None for what is free, each with its columns; where they end)."""
        pieces: list[tuple[int | None, int]] = []
        end = 0
        for i, shape in enumerate(self.shapes):
            if _divides(self.ranks, shape) and self.widths[i]:
                if self.starts[i] > end:
                    pieces.append((None, self.starts[i] - end))
                pieces.append((i, self.widths[i]))
                end = self.starts[i] + self.widths[i]
        return pieces, end

    @cached_property
    def _uneven(self) -> list[int]:
        return [i for i, shape in enumerate(self.shapes) if not _divides(self.ranks, shape)]

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


def _divides(ranks: int, shape: Sequence[int]) -> bool:
    """Whether each of so many ranks holds as many rows of it."""
    return bool(shape) and shape[0] % ranks == 0
