"""A model with drawn weights, made of its shapes: none is zero, which would hide what is behind it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.base import fresh
from nbkit.rank.parallel.module.meta_module import homes, replace, skeleton_of

_PERIOD = 65521  # a prime, so that no two rows of a matrix get the same numbers


def drawn_model(skeleton: nn.Module, dtype: torch.dtype, *, positive: bool = False) -> nn.Module:
    """A copy of `skeleton` on the CPU, with memory; floating parameters and buffers in `dtype`.

    positive: all weights are above zero. Draws from a generator of its own: another thread may be training.
    """
    model = skeleton_of(skeleton)
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(2)
    numbers = (numbers.abs() + 0.01 if positive else numbers).to(dtype)
    start = 0
    for name, places in homes(model).items():
        old: nn.Parameter = getattr(*places[0])
        kind = dtype if old.is_floating_point() else old.dtype
        replace(places, fresh(_drawn(old, name, numbers[start:]).to(kind), old))
        start = (start + old.numel()) % _PERIOD
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                # A forward may change them, in the model of which this is one copy of several.
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.detach().to("cpu", kind, copy=True)
    return model


def _drawn(old: nn.Parameter, name: str, numbers: Tensor) -> Tensor:
    size = old.numel()
    enough = numbers if size <= _PERIOD else numbers[:_PERIOD].repeat(size // _PERIOD + 1)
    noise = enough[:size].view(old.shape)
    if old.ndim > 1:
        # Sums of as many products stay as large as what goes in.
        return noise / math.sqrt(max(size // max(old.shape[0], 1), 1))
    return 0.2 * noise + (0 if name.endswith("bias") else 1)
