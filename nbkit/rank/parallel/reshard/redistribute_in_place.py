"""The data movement of a switch where memory does not hold old and new shards: tensor by tensor, the old freed.

On the wire, the bytes of the plan, in rounds as of an Exchange, and before each round one all-reduce of 8 bytes:
no rank begins what another has no memory for. A rank that has none brings all back: the same way, the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nbkit.errors import SwitchError, TrainingError
from nbkit.planner.reshard.exchange import Plan
from nbkit.planner.reshard.rank_steps import steps
from nbkit.planner.reshard.rounds import rounds
from nbkit.rank.comm.agree import any_rank
from nbkit.rank.parallel.reshard.redistribute import State, buffers_of, carry_out, check, room_of

IN_PLACE_BYTES = 8 << 20
"""A rank sends, receives and begins at most this much in a round: the tensors of it, old and new, want room too."""


class Memory(Protocol):
    """A sharded model. A tensor of `state` has memory between `take` and `let_go` of its key, and is read only then."""

    state: State

    def take(self, key: str) -> None:
        """Memory for the tensor of `key`. May raise, and has taken none then."""

    def let_go(self, key: str) -> None:
        """Nobody will read it again before the next `take`."""


class InPlace:
    """A plan as this rank carries it out in place. Raises TrainingError as Exchange does.

    buffer_bytes: what a run takes besides tensors.
    """

    def __init__(self, plan: Plan, rank: int, *, limit: int = IN_PLACE_BYTES) -> None:
        # What is handed on comes last, and an old tensor could not be freed before.
        self.plan = plan = plan.without_relays()
        self.rank, self.limit = rank, limit
        self.rounds = rounds(plan, limit=limit, in_place=limit)
        self._steps = steps(plan, self.rounds, rank)
        self._room = room_of(self._steps)
        self.buffer_bytes = sum(self._room)

    def check(self, old: Memory, new: Memory) -> None:
        """Raises TrainingError when these shards are not those of the plan."""
        check(self.plan, old.state, self.plan.old[self.rank], "old")
        check(self.plan, new.state, self.plan.new[self.rank], "new")

    def run(self, old: Memory, new: Memory, *, device: torch.device, freed: Callable[[], None] = lambda: None) -> None:
        """Lead every tensor over from `old`, which has memory, to `new`, which has none. Collective.

        freed: called when tensors have been let go of: after each round, and on the way back. When memory is refused on
        any rank, all lead back what they have led over and raise SwitchError: the old shards are as they were, in other
        memory. Raises TrainingError when a rank has no memory for the way back either.
        """
        done: list[str] = []
        if (failure := self._lead(old, new, device, freed, done)) is None:
            return
        self._back(done, old, new, device, freed, failure)
        raise SwitchError(
            "A rank had no room for its part of the new strategy; all are back at the old one.",
            numbers=f"{failure}; {len(done)} of {len(self.plan.itemsize)} tensors had been moved",
            hint="%strategy shows what each strategy takes",
        )

    def run_back(
        self, old: Memory, new: Memory, *, device: torch.device, why: str, freed: Callable[[], None] = lambda: None
    ) -> None:
        """After a `run` that has succeeded: everything back, because of `why`. Collective.

        Raises TrainingError when a rank has no memory for the way back: what it had is on no rank any more.
        """
        self._back([key for each in self.rounds for key in each.closes], old, new, device, freed, why)

    def _back(
        self, done: list[str], old: Memory, new: Memory, device: torch.device, freed: Callable[[], None], why: str
    ) -> None:
        back = InPlace(self.plan.reversed(done), self.rank, limit=self.limit)
        if (again := back._lead(new, old, device, freed, [])) is not None:
            raise TrainingError(
                "The switch failed, and so did the way back: the state is incomplete.",
                numbers=f"{why}; then {again}",
                hint="trainer.load(path)",
            )
        freed()

    def _lead(
        self, old: Memory, new: Memory, device: torch.device, freed: Callable[[], None], done: list[str]
    ) -> str | None:
        """None when all rounds are done, else why a rank could not begin one. done: gets the keys that are complete."""
        source = {key: tensor for key, (tensor, _) in old.state.items()}
        target = {key: tensor for key, (tensor, _) in new.state.items()}
        begun: list[str] = []
        buffers: tuple[Tensor, Tensor] | None = None
        for step in self._steps:
            why = ""
            try:
                buffers = buffers or buffers_of(self._room, device)
                for key in step.opens:
                    if key in target:
                        new.take(key)
                        begun.append(key)
            except Exception as error:  # whatever it was, the others must not wait for this rank
                why = f"rank {self.rank}: {type(error).__name__}: {error}"
            if any_rank(bool(why), device=device):
                for key in set(begun).difference(done):
                    new.let_go(key)
                freed()
                return why or "another rank could not go on"
            assert buffers is not None
            carry_out(step, source, target, buffers)
            done += step.closes
            for key in step.closes:
                if key in source:
                    old.let_go(key)
            freed()
        return None
