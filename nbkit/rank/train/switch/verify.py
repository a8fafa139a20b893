"""Verifies beside the first step under the new strategy that a switch has kept the state: nobody waits for it.

A thread of each rank hashes what the old sharded model and the new one hold, while the new one does its first forward
and backward passes, which change no weight; before the optimizer changes any, one all-reduce adds the sums up. On a GPU
the thread computes on a stream of its own.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import torch
import torch.distributed as dist

from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.reshard.state_digest import sums
from nbkit.rank.train.checkpoint.job_state import JobState


class Comparison:
    """Of two states, begun in a thread. The numbers of `new` that a forward pass changes are copied first."""

    def __init__(self, old: JobState, new: JobState, plan: Plan, *, rank: int, device: torch.device) -> None:
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
        """Whether all ranks have found that the states were the same. Collective."""
        self._thread.join()
        totals = torch.cat([self._sums.flatten(), torch.tensor([int(self._failed)])]).to(self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
        *found, failed = totals.tolist()
        half = len(self._keys)
        return not failed and found[:half] == found[half:]

    def drop(self) -> None:
        """Nobody wants to know any more."""
        self._thread.join()


def _changes(key: str) -> bool:
    return key.startswith("buffer/")
