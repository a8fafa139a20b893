"""Collectives in which ranks tell each other about names. New ranks take part that have a world but no training yet."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from nbkit.bridge import calls
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.device import accelerator

Told = TypeVar("Told")
Handed = TypeVar("Handed")


def gathered(told: Told) -> list[Told]:
    """Return the values of all ranks, in rank order. Collective."""
    assert calls.place is not None
    device = accelerator().device(calls.place.device)
    return all_gather_objects(told, world_size=calls.place.world_size, device=device)


def broadcast(handed: Handed | None, giver: int) -> Handed:
    """Return the value that rank `giver` hands to all. Collective."""
    assert calls.place is not None
    told: list[Any] = [handed]
    dist.broadcast_object_list(told, src=giver, device=accelerator().device(calls.place.device))
    assert told[0] is not None
    return told[0]  # type: ignore[no-any-return]
