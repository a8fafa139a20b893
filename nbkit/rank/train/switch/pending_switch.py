"""A switch under which no step has been made yet, and the proof that it has kept the state.

`Comparison` makes the proof beside the first step under the new strategy: nobody waits for it. A thread of each rank
hashes what the old sharded model and the new one hold, while the new one does its first forward and backward passes,
which change no weight. Before the optimizer changes any, one all-reduce adds the sums up. On a GPU the thread computes
on a stream of its own. `PendingSwitch` says what came of the switch.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import nullcontext

import torch
import torch.distributed as dist

from nbkit.errors import SwitchError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.reshard.state_digest import sums
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.transaction import TrainingState
from nbkit.records.events import Switched
from nbkit.strategy import Strategy


class Comparison:
    """A comparison of two states, made in a thread. Numbers of `new` that a forward pass changes are copied first."""

    def __init__(self, old: JobState, new: JobState, plan: ExchangePlan, *, rank: int, device: torch.device) -> None:
        self._device, self._failed = device, False
        self._keys = sorted({key for holding in (*plan.old, *plan.new) for key in holding})
        self._sums = torch.zeros(2, len(self._keys), dtype=torch.int64)
        # Running statistics are buffers, and change with every forward pass.
        kept = {key: (tensor.clone() if _changes(key) else tensor, layout) for key, (tensor, layout) in new.items()}
        begun = accelerator().event(device) if accelerator().holds(device) else None

        def run() -> None:
            try:
                with nullcontext() if begun is None else accelerator().beside(device, after=begun):
                    for row, (state, holdings) in enumerate(((old, plan.old), (kept, plan.new))):
                        self._sums[row] = sums(state, holdings, self._keys, rank=rank).cpu()
            except Exception as error:
                self._failed = True
                print(f"no proof of a switch: {type(error).__name__}: {error}", file=sys.__stderr__)

        self._thread = threading.Thread(target=run, name="nbkit-proof", daemon=True)
        self._thread.start()

    def identical(self) -> bool:
        """Return True if all ranks have found that the states were the same. Collective."""
        self._thread.join()
        totals = torch.cat([self._sums.flatten(), torch.tensor([int(self._failed)])]).to(self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
        *found, failed = totals.tolist()
        half = len(self._keys)
        return not failed and found[:half] == found[half:]

    def drop(self) -> None:
        """Wait for the thread. Its result is not needed any more."""
        self._thread.join()


def _changes(key: str) -> bool:
    return key.startswith("buffer/")


class PendingSwitch(Future[Switched]):
    """A future: `result()` is the event once the first step under the new strategy was made.

    It raises what took it back. old: the strategy of the last step, to which a failure goes back. switches: how many
    were made before it. event: the switch, with what the comparison found, if known. previous: the state under `old`,
    if memory keeps it until the first step has been made. comparison: of the two states, until they were found to be
    the same. guarded: the first step is being made.
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
        self.guarded = False

    def resolve(self, error: BaseException | None = None) -> None:
        """Set the result: the switch stays, or the ranks have raised `error`. A result that is set is not changed."""
        if self.done():
            return
        if error is None:
            self.set_result(self.event)
        else:
            self.set_exception(error)

    def refusal(self, step: int, why: str) -> SwitchError:
        """Return the error for a first step, after `step` finished ones, that has failed."""
        return SwitchError(
            f"{self.old} → {self.event.new} was taken back after step {step}: the first step under it failed, "
            f"and training goes on under {self.old}.",
            numbers=why,
            hint="%strategy shows what can be picked",
        )

    def follow(self, other: Future[Switched]) -> None:
        """Take over the result of `other`, which was made in its place."""
        if (error := other.exception()) is None:
            self.event = other.result()
        self.resolve(error)


def free(states: list[TrainingState]) -> None:
    """Close what computed under the only one of `states`, take it out, and free its memory.

    On a GPU the memory goes back to the device: NCCL takes the memory of a communicator from there, and cannot have
    what torch's allocator keeps in reserve.
    """
    device = next((tensor.device for tensor in states[0].sharded_model.data.tensors()), torch.device("cpu"))
    held = [weakref.ref(tensor) for tensor in states[0].sharded_model.data.tensors()]
    states[0].sharded_model.close()
    states.clear()
    # The next steps need its memory. Collect only if necessary: a collection takes longer than the rest of a switch.
    if any(tensor() is not None for tensor in held):
        gc.collect()
    if accelerator().holds(device):
        accelerator().trim()
