"""Rows of a batch that differ in what a loss may weigh them by: ignored labels, masks, padding, classes, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100  # of torch's cross_entropy, and of the labels of transformers


def differing_pairs(batch: Any, rows: int) -> list[tuple[int, int]]:
    """Pairs of rows, those first that differ most in what most often weighs a row; (0, 1) where no two differ."""
    found: dict[frozenset[int], tuple[int, int]] = {}
    for _, column in sorted(_columns(batch, rows), key=lambda each: each[0]):
        if column.max() > column.min():
            pair = int(column.argmin()), int(column.argmax())
            found.setdefault(frozenset(pair), pair)
    return list(found.values()) or [(0, 1)]


def varying(batch: Any, rows: int) -> frozenset[int]:
    """Which of the numbers that may weigh a row are not the same for all rows."""
    return frozenset(i for i, (_, column) in enumerate(_columns(batch, rows)) if column.max() > column.min())


def spread_rows(batch: Any, rows: int, most: int) -> list[int]:
    """At most `most` rows: those of the pairs, one of each class, then evenly from all."""
    chosen = [row for pair in differing_pairs(batch, rows) for row in pair]
    for rank, column in _columns(batch, rows):
        if rank == 0:
            first: dict[float, int] = {}
            for row, value in enumerate(column.tolist()):
                first.setdefault(value, row)
            chosen += first.values()
    chosen += range(0, rows, max(rows // most, 1))
    return list(dict.fromkeys([*chosen, *range(rows)]))[:most]


def _columns(part: Any, rows: int) -> Iterator[tuple[int, Tensor]]:
    """(rank, a number for each row): rank 0 are ignored labels, classes and lengths; higher ones matter less."""
    if isinstance(part, Tensor) and part.ndim and part.shape[0] == rows and part.numel():
        yield from _of_tensor(part.detach().reshape(rows, -1).cpu())
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _columns(value, rows)
    elif isinstance(part, tuple | list):
        if len(part) == rows and not any(isinstance(value, Tensor) and value.shape[:1] == (rows,) for value in part):
            yield 0, torch.tensor([_length(value) for value in part], dtype=torch.float64)
        for value in part:
            yield from _columns(value, rows)


def _of_tensor(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    def count(mask: Tensor) -> Tensor:
        return mask.sum(1).double()

    if flat.is_floating_point():
        yield 0, count(flat.isnan())
        yield 1, count(flat == 0)
        yield 3, flat.double().nan_to_num().mean(1)
    elif not flat.is_complex():
        if flat.shape[1] == 1:
            yield 0, flat[:, 0].double()
            return
        if flat.dtype != torch.bool:
            yield 0, count(flat == _IGNORED)
            yield 1, count(flat < 0)
        yield 1, count(flat == 0)
        # Padding with whatever number: what stands at the end, or at the beginning, as often as it is there.
        yield 2, count(flat == flat[:, -1:])
        yield 2, count(flat == flat[:, :1])


def _length(value: Any) -> float:
    return float(value.numel() if isinstance(value, Tensor) else len(value) if hasattr(value, "__len__") else 0)
