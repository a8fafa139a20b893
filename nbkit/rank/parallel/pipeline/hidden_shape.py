"""The shape of what goes from block to block: from it follows what tensor, pipeline and context parallelism send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbkit.rank.parallel.pipeline.layer_chain import Chain
from nbkit.rank.parallel.proof.calls import watched
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.torch_private import pytree


def hidden_between(module: nn.Module, chain: Chain, call: Callable[[], Any]) -> tuple[int, int] | None:
    """(positions, width) of the hidden states, where each block hands one tensor (rows, positions, width) to the next.

    call: runs the whole model once. None where it hands on something else, or not everywhere the same.
    """
    seen: set[tuple[int, ...]] = set()

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        entry = chain.entries[chain.blocks.index(name)]
        paths = {path for path in entry.carried if path not in entry.kept}
        leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
        shapes = [tuple(leaf.shape) for key, leaf in leaves if pytree.keystr(key) in paths]
        seen.add(shapes[0] if len(shapes) == 1 and not entry.skips else ())

    with unchanged(module), watched(module, enter, names=chain.blocks[1:]), torch.no_grad():
        call()
    (shape, *others) = seen or {()}
    return (shape[1], shape[2]) if not others and len(shape) == 3 else None
