"""Computes the peak memory of a switch, and whether it goes in place because memory does not hold both models.

Beside each other, a rank holds the old model, the new one and the buffers of the exchange. In place it leads tensor
after tensor over and lets go as it goes: it holds the larger of the two models and SPARE_BYTES at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SPARE_BYTES = 64 << 20
"""Beside the larger model: buffers of a round, and the tensors, old and new, that are on their way in it."""


class During(NamedTuple):
    """num_bytes: per rank, at the peak of the switch. in_place: whether all ranks go in place."""

    num_bytes: tuple[int, ...]
    in_place: bool


def during(old: Sequence[int], new: Sequence[int], *, buffers: int, left: Sequence[int | None]) -> During:
    """Return what each rank holds at the peak of a switch.

    old, new: bytes of a rank's model (weights, optimizer state, and the gradients that it keeps between steps).
    buffers: of the exchange, see Exchange.buffer_bytes. left: bytes that a rank can still take while it holds the old
    model, None where that is not known. Where one rank has no room for both, all go in place.
    """
    both_fit = all(fits(after, buffers=buffers, left=free) for after, free in zip(new, left, strict=True))
    pairs = zip(old, new, strict=True)
    if both_fit:
        return During(tuple(before + after + buffers for before, after in pairs), in_place=False)
    return During(tuple(max(before, after) + SPARE_BYTES for before, after in pairs), in_place=True)


def fits(new: int, *, buffers: int, left: int | None) -> bool:
    """Return True if a rank that can still take `left` bytes has room for a second model of `new` bytes beside its
    own."""
    return left is None or new + buffers <= left
