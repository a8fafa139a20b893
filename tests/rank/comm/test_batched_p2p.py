"""Test that a batch of sends and receives stays a batch on delegating groups. If not, nccl ranks deadlock."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks


class Coalescing:
    """A wrapper of a gloo group that makes batches, as nccl can: it issues the operations when the batch ends."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls, self.held = inner, [], None
        self.supports_coalescing = True

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")
        self.held = []

    def _end_coalescing(self, device: torch.device) -> Any:
        self.calls.append("end")
        works = [issue() for issue in self.held]
        self.held = None
        works[0].wait()
        return works[1]

    def send(self, *args: Any) -> Any:
        return self._issue("send", *args)

    def recv(self, *args: Any) -> Any:
        return self._issue("recv", *args)

    def _issue(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        if self.held is None:
            return getattr(self.inner, name)(*args)
        self.held.append(lambda: getattr(self.inner, name)(*args))
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def exchanged(world: Any) -> list[Any]:
    group: Any = dist.group.WORLD
    other = 1 - world.place.rank
    found = []
    for wrapped in (False, True):
        if wrapped:
            group.inner = Coalescing(group.inner)
        mine, theirs = torch.full((2,), float(world.place.rank)), torch.empty(2)
        batch = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        found.append(theirs.tolist())
    return [*found, group.inner.calls]


def test_batched_messages_are_right_and_stay_a_batch_if_the_backend_makes_batches() -> None:
    for rank, found in enumerate(run_ranks(exchanged, 2)):
        other = [float(1 - rank)] * 2
        assert found == [other, other, ["start", "send", "recv", "end"]]
