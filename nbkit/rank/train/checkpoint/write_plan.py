"""Gathers what all ranks hold of a job's state, and decides which of them writes which box of it: each box once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbkit.planner.reshard.boxes import halves, held, uncovered
from nbkit.rank.comm.all_gather_objects import all_gather_objects
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.tensor_layout import Box, Layout

_BOX_BYTES = 64 << 20
"""Larger boxes are kept as several, so that reading a small part of one reads little else."""


@dataclass(frozen=True)
class Everyone:
    """layouts: by rank, key -> layout. kinds: key -> dtype. numbers: see job_state.scalars; both of all ranks."""

    layouts: tuple[Mapping[str, Layout], ...]
    kinds: Mapping[str, torch.dtype]
    numbers: Mapping[str, Mapping[str, Any]]


def everyone(
    own: JobState, numbers: Mapping[str, Mapping[str, Any]], world_size: int, device: torch.device
) -> Everyone:
    """What all ranks hold. Collective: one all-gather of layouts and numbers."""
    # Equal layouts as one object: pickled once, and told apart by identity where they arrive.
    known: dict[Layout, Layout] = {}
    layouts = {key: known.setdefault(layout, layout) for key, (_, layout) in own.items()}
    mine = layouts, {key: tensor.dtype for key, (tensor, _) in own.items()}, numbers
    found = all_gather_objects(mine, world_size=world_size, device=device)
    return Everyone(
        tuple({key: known.setdefault(layout, layout) for key, layout in one.items()} for one, _, _ in found),
        {key: kind for _, kinds, _ in found for key, kind in kinds.items()},
        {name: values for _, _, all_numbers in found for name, values in all_numbers.items()},
    )


def by_name(kinds: Mapping[str, torch.dtype]) -> dict[str, dict[str, torch.dtype]]:
    """name -> {key: dtype} of what an optimizer keeps, out of the dtypes of everything."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for key, dtype in kinds.items():
        kind, _, name = key.partition("/")
        if kind not in ("weight", "buffer"):
            found.setdefault(name, {})[kind] = dtype
    return found


def shares(every: Everyone, rank: int) -> dict[str, list[Box]]:
    """key -> the boxes that `rank` writes. Every element is written by one rank that holds it; who has least, writes.

    The same on every rank that computes it, without a message.
    """
    load = [0] * len(every.layouts)
    cells: dict[tuple[int, ...], list[tuple[Box, tuple[int, ...]]]] = {}
    mine: dict[str, list[Box]] = {}
    for key in sorted({key for layouts in every.layouts for key in layouts}):
        spread = [layouts.get(key) for layouts in every.layouts]
        size = every.kinds[key].itemsize
        alike = (size, *map(id, spread))
        if alike not in cells:
            cells[alike] = _cells(spread, _BOX_BYTES // size)
        for box, ranks in cells[alike]:
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += box.numel * size
            if writer == rank:
                mine.setdefault(key, []).append(box)
    return mine


def _cells(spread: Sequence[Layout | None], most: int) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes of at most `most` elements that do not overlap and cover all that is held: (box, ranks that hold it)."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, tuple[int, ...]]] = []
    taken: list[Box] = []
    for box, ranks in holders.items():
        found += [(part, tuple(ranks)) for rest in uncovered((box,), taken) for part in halves(rest, most)]
        taken.append(box)
    return found
