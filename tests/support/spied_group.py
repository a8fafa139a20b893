"""An inner group of nbkit's group that records what it sends, to compare with what listeners are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbkit.rank.comm import delegating_group


class Spy:
    """An inner group that records which of its methods are called, and with how many bytes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.called: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.inner, name)
        if not callable(own) or name in ("size", "rank", "_get_backend"):
            return own

        def call(*args: Any) -> Any:
            self.called.append((name, args[1].nbytes if isinstance(args[1], torch.Tensor) else 0))
            return own(*args)

        return call


def on_the_wire(operation: Callable[[Any], object]) -> tuple[list[tuple[str, int]], list[Any], int]:
    """Return (calls of the inner group with their bytes, what listeners heard, number of operations counted).

    operation: called with the world's group.
    """
    group = dist.group.WORLD
    assert isinstance(group, delegating_group.DelegatingGroup)
    group.inner = spy = Spy(group.inner)
    heard: list[Any] = []
    delegating_group.listeners.append(lambda *told: heard.append(told))
    before = group.count
    operation(group)
    return spy.called, heard, group.count - before
