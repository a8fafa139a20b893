"""A switch under which no step has been made yet: the one value that says what came of it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import torch

from nbkit.errors import SwitchError
from nbkit.rank.device import accelerator
from nbkit.rank.train.control.collective_guard import Guard
from nbkit.rank.train.switch.verify import Comparison
from nbkit.rank.train.training_state import TrainingState
from nbkit.records.events import Switched
from nbkit.strategy import Strategy


class PendingSwitch(Future[Switched]):
    """`result()` is the event once the first step under the new strategy has been made; it raises what took it back.

    old: the strategy of the last step, which is gone back to. switches: how many were made before it. event: the
    switch; with what the comparison found, when it has. previous: the state under `old`, where memory keeps it until
    the first step has been made. comparison: of the two, until it has been found that they are the same. guard: of the
    first step, while it is being made.
    """

    def __init__(
        self,
        event: Switched,
        old: Strategy,
        switches: int,
        *,
        previous: TrainingState | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        super().__init__()
        self.event, self.old, self.switches = event, old, switches
        self.previous, self.comparison = previous, comparison
        self.guard: Guard | None = None

    def resolve(self, error: BaseException | None = None) -> None:
        """The switch stays, or the ranks have raised `error`. What is known already stays known."""
        if self.done():
            return
        if error is None:
            self.set_result(self.event)
        else:
            self.set_exception(error)

    def refusal(self, step: int, why: str) -> SwitchError:
        """What it is resolved with when the first step, after `step` finished ones, has failed."""
        return SwitchError(
            f"{self.old} → {self.event.new} was taken back after step {step}: the first step under it failed, "
            f"and training goes on under {self.old}.",
            numbers=why,
            hint="%strategy shows what can be picked",
        )

    def follow(self, other: Future[Switched]) -> None:
        """What came of `other`, which was made in its place, came of this one."""
        if (error := other.exception()) is None:
            self.event = other.result()
        self.resolve(error)


def free(states: list[TrainingState]) -> None:
    """Close what computed under the only one of `states`, and take it out: its memory is free.

    On a GPU it goes back to the device: NCCL takes the memory of a communicator from there, and cannot have what
    torch's allocator keeps in reserve.
    """
    device = next((tensor.device for tensor in states[0].sharded_model.data.tensors()), torch.device("cpu"))
    held = [weakref.ref(tensor) for tensor in states[0].sharded_model.data.tensors()]
    states[0].sharded_model.close()
    states.clear()
    # The next steps want its memory, and a collection stops them for longer than all the rest of a switch.
    if any(tensor() is not None for tensor in held):
        gc.collect()
    if accelerator().holds(device):
        accelerator().trim()
