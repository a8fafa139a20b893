"""A rank that stays when the number of ranks changes: it takes its new place, and forms the world with the others."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nbkit.bridge import calls
from nbkit.errors import Stopped
from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.rank.world import world
from nbkit.wire.messages import FormResizedWorld

if TYPE_CHECKING:
    from nbkit.bridge.replacing.survivor import SurvivingRank

FORM_SECONDS = 30.0


class RankLeft(Stopped):
    """Raised on a rank that leaves: its cell ends here, and then its process ends."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]  # nobody reads it, and a traceback with frames takes IPython seconds


def form_resized(rank: SurvivingRank, form: FormResizedWorld, trainer: Any, span: FitRange | None) -> tuple[int, ...]:
    """Form the world that `form` describes, and hand its new ranks what they need. Returns the new ranks."""
    here, size, newcomers = world.current(), form.size, form.newcomers
    assert here is not None
    place = replace(here.place, world_size=size, local_world_size=size)
    take_pin(form.pins[place.rank])
    calls.place = place
    running, names = rank.runner.running[0], rank.runner.shell.user_ns
    if names.get("world_size") == here.place.world_size:
        names["world_size"] = size
    listener = calls.take_listener() if place.rank == 0 else None
    here.resize(place, form.generation, listen=listener, address=form.address, port=form.port, timeout_s=FORM_SECONDS)
    running.request = replace(running.request, ranks=tuple(range(size)))
    if newcomers:
        rank.hand_over(trainer, span, newcomers)
    return newcomers


def take_pin(pin: dict[str, Any]) -> None:
    """Use the cores and threads that are planned for the new number of ranks. The GPU stays the same."""
    if pin["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, pin["cores"])
    os.environ["OMP_NUM_THREADS"] = str(pin["threads"])
    torch.set_num_threads(pin["threads"])
