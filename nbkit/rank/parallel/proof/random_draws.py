"""Random numbers while a model is tried out: what it draws by itself is noted, and its dropout drops nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nbkit.rank.rng.dropout_ops import DRAWS, AttentionMask
from nbkit.rank.watching_mode import WatchingMode


class Draws(WatchingMode):
    """Notes every operation that draws random numbers in `found`, a list that several may share.

    Attention counts as none: it may draw, and does so for dropout alone.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__:
            self.found.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class DroppingNothing(TorchFunctionMode):
    """Inside, dropout scales as ever and drops no element, so that a model can be compared with itself in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw = DRAWS.get(func)
        if draw is None:
            return func(*args, **(kwargs or {}))
        device = next((x.device for x in args if isinstance(x, Tensor)), None)
        return draw(func, _Nothing(device), *args, **(kwargs or {}))


class _Nothing(AttentionMask):
    """The mask of what drops nothing, on `device`; attention cannot leave it to its kernel."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def __call__(self, shape: Sequence[int], p: float, /) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.bool, device=self.device)

    def in_kernel(self, device: torch.device) -> None:
        return None
