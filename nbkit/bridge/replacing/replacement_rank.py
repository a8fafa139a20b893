"""A new rank of an existing world: it joins, gets names and a Trainer, and enters the cell.

It takes the place of a rank that died, or it is an additional rank of a resize.
"""

from __future__ import annotations

import os

import torch

from nbkit.bridge import calls
from nbkit.bridge.replacing.handover import data_of, parts_of, receive
from nbkit.bridge.replacing.statement import NOWHERE, Entering
from nbkit.bridge.replacing.surviving_rank import FORM_SECONDS
from nbkit.bridge.runner import Runner
from nbkit.rank.train.replace.pickle_by_value import loads
from nbkit.rank.train.replace.resume_fit import NewWorld, save_and_leave, together
from nbkit.rank.train.resize.resize import joined
from nbkit.rank.world.world import World
from nbkit.wire.messages import FormResizedWorld, FormWorld, ReadyToForm
from nbkit.wire.processes import Process


class ReplacementRank:
    """A new rank, until it has entered the cell. There is one object per new rank."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def announce(self) -> None:
        """Tell the parent that this rank is ready to join. The parent answers when all ranks are ready."""
        assert calls.place is not None
        address, port = calls.open_store() if calls.place.rank == 0 else ("", 0)
        self.runner.link.send(ReadyToForm(0, -1, address, port, process=Process.of(os.getpid())))

    def take_over(self, form: FormWorld | FormResizedWorld) -> None:
        """Join the world, and run the cell from the statement that trains. Call it in the main thread.

        An error ends this process: another rank has died meanwhile, or the state of the training is lost.
        """
        place, newcomers, statement = calls.place, form.newcomers, form.statement
        assert place is not None
        World.join(
            place,
            listen=calls.take_listener() if place.rank == 0 else None,
            address=form.address,
            port=form.port,
            generation=form.generation,
            timeout_s=FORM_SECONDS,
        )
        handed = receive(newcomers)
        torch.set_default_dtype(handed.dtype)
        names = self.runner.shell.user_ns
        names.update(loads(handed.names))
        if handed.trains:
            if isinstance(form, FormWorld):
                trainer = together(None, NewWorld(newcomers, form.how, form.since, form.devices))
            else:
                trainer = joined(newcomers)
            parts = parts_of(trainer) | data_of(trainer)
            names.update({name: parts[part] for name, part in handed.bound.items()})
            if handed.span is not None and statement == NOWHERE:
                save_and_leave(trainer)
            elif handed.span is not None:
                dead = len(newcomers) if isinstance(form, FormWorld) else 0
                trainer.join(handed.span.without(trainer, dead))
        lacks = ", ".join(name for name in handed.lacks if name not in names)
        remark = f"rank {place.rank} is new and does not have: {lacks}" if lacks else ""
        if handed.span is not None:
            self.runner.run(handed.request, enters=Entering(statement), remark=remark)
