"""Measures what each piece of a chain costs on this device: the seconds of its forward and its backward.

The model runs whole, so that nothing of what cutting adds is in the numbers. Clocks are read where a piece begins: when
its block is called, and when the gradient of what went into that block is complete. Blocks that are alike and get
tensors of the same shapes cost the same: what their numbers differ by is noise, and would decide where the cuts fall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.pipeline.layer_chain import Chain
from nbkit.rank.parallel.proof.calls import watched
from nbkit.rank.parallel.proof.graph import run_backward
from nbkit.rank.parallel.proof.memory import tensors_in
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.torch_private import pytree

_APART = 1.4  # pieces that look alike and differ by more than this factor are not


def measure_costs(module: nn.Module, chain: Chain, call: Callable[[], Any], *, repeats: int = 3) -> tuple[float, ...]:
    """Seconds of each piece, forward and backward, the least of `repeats` runs after one to warm up.

    call: runs the whole model once; it may return the output or the loss, which then counts to the last piece. What
    comes before the first block counts to the first piece, what follows the last block to the last one.
    Parameters, gradients, buffers and random generators are afterwards as before. Let other ranks be idle meanwhile.
    Raises StrategyError when what `call` returns does not depend on a parameter.
    """
    device = next(module.parameters()).device
    kinds: list[Hashable] = [None] * len(chain)
    with unchanged(module):
        runs = [_run(module, chain, call, device, kinds) for _ in range(repeats + 1)][1:]
    # The first and the last piece are more than their blocks.
    kinds[0] = kinds[-1] = None
    return _level(tuple(map(min, zip(*runs, strict=True))), kinds)


def _level(costs: Sequence[float], kinds: Sequence[Hashable]) -> tuple[float, ...]:
    """`costs`, where pieces of one kind (None: of none) have the median of theirs, unless they differ too much."""
    alike: dict[Hashable, list[float]] = {}
    for cost, kind in zip(costs, kinds, strict=True):
        alike.setdefault(kind, []).append(cost)
    middle = {kind: median(some) for kind, some in alike.items() if kind is not None}
    return tuple(
        middle[kind] if kind in middle and middle[kind] / _APART <= cost <= middle[kind] * _APART else cost
        for cost, kind in zip(costs, kinds, strict=True)
    )


def _run(
    module: nn.Module, chain: Chain, call: Callable[[], Any], device: torch.device, kinds: list[Hashable]
) -> list[float]:
    called, arrived = [0.0] * len(chain), [0.0] * len(chain)
    end = 0.0

    def now() -> float:
        if accelerator().holds(device):
            accelerator().wait_for_all(device)
        return time.perf_counter()

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if end:  # the model's own checkpointing computes the block again, which belongs to its backward
            return
        number = chain.blocks.index(name)
        entry = chain.entries[number]

        def arrive(_: Tensor) -> None:
            arrived[number] = now()

        kinds[number] = kinds[number] or (repr(block), *(tuple(t.shape) for t in tensors_in((args, kwargs))))
        for key, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            path = pytree.keystr(key)
            # The gradient of what the caller gives to several blocks is complete only at the first of them.
            if path in entry.carried and path not in entry.kept and leaf.requires_grad:
                leaf.register_hook(arrive)
        called[number] = now()

    with watched(module, enter, names=chain.blocks[1:]):
        called[0] = now()
        results = [t for t in tensors_in(call()) if t.requires_grad]
        end = now()
        if not results:
            raise StrategyError(
                "What the model gives does not depend on its parameters, so that its backward costs nothing.",
                numbers="no tensor of the output requires a gradient",
                hint="measure with gradients enabled, and a parameter that is not frozen",
            )
        run_backward(results)
        back = now()
    # Without a gradient there, nothing before it runs backward (frozen parameters).
    starts = [back] + [arrived[i] or back for i in range(1, len(chain))]
    forward = [b - a for a, b in zip(called, [*called[1:], end], strict=True)]
    backward = [a - b for a, b in zip(starts, [*starts[1:], end], strict=True)]
    for p in module.parameters():
        p.grad = None
    return [f + max(b, 0.0) for f, b in zip(forward, backward, strict=True)]
