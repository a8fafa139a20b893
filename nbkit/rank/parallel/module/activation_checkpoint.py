"""Activation checkpointing (Chen et al. 2016): a block keeps what goes into it, and is computed again in backward.

What the computation depends on beside its arguments is as it was the first time: extents, the positions of a context
split, dropout (keyed, hence with the same mask), and torch's generators. It does not matter which thread recomputes.

Only `forward` is replaced, so names, hooks and signatures stay. The order that follows for whoever composes:
tensor and context parallel surgery first, so that their collectives are within what is recomputed (ranks of a group
recompute the same blocks in the same order); hooks that gather a block's shards last, on the block itself: they run
once per forward and once before its backward, and the recomputation in between finds the parameters whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbkit.rank.parallel.module.forward_wrapper import Wrapper
from nbkit.rank.rng.keyed_dropout import again


def recompute(module: nn.Module, blocks: Iterable[str]) -> None:
    """From now on the blocks of these names keep no activations between forward and backward. In place."""
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = _Forgetful(block.forward)  # type: ignore[method-assign]


class _Forgetful(Wrapper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.plain
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        surroundings, replayed, first = copy_context(), again(), True

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return forward(*args, **kwargs)

            def once_more() -> Any:
                with replayed():
                    return forward(*args, **kwargs)

            # A copy: backward may come here more than once (retain_graph), and a context is entered by one at a time.
            return surroundings.copy().run(once_more)

        return checkpoint(compute, *args, use_reentrant=False, **kwargs)
