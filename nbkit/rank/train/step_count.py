"""Counts what one step of this rank holds at its peak, and what it sends.

A device's allocator tells its peak. On CPU ranks the step runs under a mode that sees every operation, and adds up the
storages that are alive. That takes microseconds for each operation, so only one step of a strategy is counted. The
growth of the process is another quantity: it also has what the analysis of the model, threads and caches took.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nbkit.rank.device import accelerator
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.telemetry.collectives import ring
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.train.out_of_memory.tensor_limit import held_by
from nbkit.records.readings import BACKUP, sent_bytes


@dataclass(frozen=True)
class Counts:
    """Bytes of a step. peak: held at its highest moment. sent: see `records.readings.sent_bytes`. 0: not known.

    On one rank, or on the ranks that hold and send most.
    """

    peak: int = 0
    sent: int = 0


class StepCount:
    """The count of a step that is being made. Its parts run in `part`, and `done` ends it."""

    def __init__(
        self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, device: torch.device, *, memory: bool
    ) -> None:
        """memory: count it on CPU ranks too. A compiled model sees no mode."""
        self._model, self._optimizer, self._device = sharded_model, optimizer, device
        self._watches = memory and not accelerator().holds(device)
        self._live: LiveBytes | None = None
        self._since = ring.end

    @contextmanager
    def part(self) -> Iterator[None]:
        """Count inside."""
        if not self._watches:
            yield
            return
        if self._live is None:
            # Storages that zero 3 fills and empties change their size.
            self._live = LiveBytes(held_by(self._model, self._optimizer), resized=self._model.strategy.zero == 3)
        with self._live:
            yield

    def done(self) -> Counts:
        """Return the counts of the step."""
        calls, lost = ring.between(self._since, ring.end)
        own = (call for call in calls if call.axis != BACKUP)
        sent = sum(sent_bytes(call.op, call.bytes, len(call.group.members)) for call in own)
        if accelerator().holds(self._device):
            peak = accelerator().memory(self._device)[1]
        else:
            peak = self._live.peak if self._live is not None else 0
        return Counts(peak, 0 if lost else round(sent))
