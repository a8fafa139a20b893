"""Computes the peak memory of a switch, and whether it runs in place because memory does not hold both models.

Normally, a rank holds the old model, the new model and the buffers of the exchange at the same time. In place, it
moves one tensor after the other and releases each old one. It then holds at most the larger of the two models plus
SPARE_BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SPARE_BYTES = 64 << 20
"""Bytes beside the larger model: the buffers of a round, and the old and new tensors that move in it."""


class During(NamedTuple):
    """Memory of a switch. num_bytes: per rank, at the peak. in_place: True if all ranks switch in place."""

    num_bytes: tuple[int, ...]
    in_place: bool


def during(old: Sequence[int], new: Sequence[int], *, buffers: int, left: Sequence[int | None]) -> During:
    """Return what each rank holds at the peak of a switch.

    old, new: bytes of a rank's model (weights, optimizer state, and the gradients that it keeps between steps).
    buffers: of the exchange, see Exchange.buffer_bytes. left: bytes that a rank can still allocate while it holds the
    old model; None if unknown. If one rank has no room for both models, all ranks switch in place.
    """
    both_fit = all(fits(after, buffers=buffers, left=free) for after, free in zip(new, left, strict=True))
    pairs = zip(old, new, strict=True)
    if both_fit:
        return During(tuple(before + after + buffers for before, after in pairs), in_place=False)
    return During(tuple(max(before, after) + SPARE_BYTES for before, after in pairs), in_place=True)


def fits(new: int, *, buffers: int, left: int | None) -> bool:
    """Return True if a rank that can still allocate `left` bytes has room for a second model of `new` bytes."""
    return left is None or new + buffers <= left
