"""Fill a sharded model from a whole model that every rank has: each rank copies its own boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.tensor_layout import Layout


@torch.no_grad()
def copy_part(target: Tensor, layout: Layout, whole: Tensor) -> None:
    """Fill `target` with the boxes of `whole` in `layout`."""
    if target.data_ptr() == whole.data_ptr() and layout.is_whole:
        return
    for here, there in layout.pieces:
        target[here.slices].copy_(whole[there.slices])


def fill_weights(sharded_model: ShardedModel, module: nn.Module) -> None:
    """Fill the weights of `sharded_model` from the whole `module`. Buffers are in the skeleton already."""
    whole = dict(module.named_parameters())
    for name, (target, layout) in sharded_model.data.weights.items():
        copy_part(target, layout, whole[name].detach())
    sharded_model.data.refresh()


def fill_state(
    sharded_model: ShardedModel,
    state: Mapping[str, Mapping[str, object]],
    put: Callable[[nn.Parameter, str, object], None],
) -> None:
    """Give an optimizer over `sharded_model` its part of `state`.

    state: parameter name -> optimizer state of the whole parameter. put: stores a value in the optimizer's state.
    """
    for name, param in sharded_model.held.items():
        whole = state.get(name)
        if whole is None:
            continue
        layout = sharded_model.layouts[name]
        for key, value in whole.items():
            if isinstance(value, Tensor) and tuple(value.shape) == layout.shape and value.ndim:
                part = torch.empty(layout.local, dtype=value.dtype, device=value.device)
                copy_part(part, layout, value)
                put(param, key, part)
            else:
                put(param, key, value.clone() if isinstance(value, Tensor) else value)
