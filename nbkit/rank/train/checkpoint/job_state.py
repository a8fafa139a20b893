"""Everything a rank holds of a job's state, under names that mean the same on every rank and in every strategy.

"weight/NAME", "KEY/NAME" for what the optimizer keeps per element of a parameter (exp_avg, momentum_buffer, ...), and,
apart, the numbers it keeps per parameter (step).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.buffer_updates import kept_buffers
from nbkit.rank.parallel.reshard.resizable_storage import emptied
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.step import optimizer_state
from nbkit.tensor_layout import Layout

JobState = dict[str, tuple[Tensor, Layout]]


def weights(sharded_model: ShardedModel) -> JobState:
    """The weights of a sharded model, by "weight/NAME"."""
    return {
        f"weight/{name}": (tensor.detach(), layout) for name, (tensor, layout) in sharded_model.data.weights.items()
    }


@torch.no_grad()
def not_finite(sharded_model: ShardedModel) -> list[str]:
    """Return the names of the weights that train and of which this rank holds a NaN or an infinity. Waits for them."""
    alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, p in sharded_model.held.items():
        if p.requires_grad and p.numel() and p.element_size() > 1:  # of one byte: no operation knows them
            alike.setdefault((p.device, p.dtype), {})[name] = p
    found: list[str] = []
    for some in alike.values():
        largest = torch.stack(torch._foreach_norm(list(some.values()), torch.inf))
        found += [name for name, good in zip(some, largest.isfinite().tolist(), strict=True) if not good]
    return found


def buffers(sharded_model: ShardedModel) -> JobState:
    """The buffers that a checkpoint holds, of modules that run here, by "buffer/NAME"; each is whole."""
    here = {name: buffer for name, buffer in sharded_model.module.named_buffers() if sharded_model.runs(name)}
    kept = kept_buffers(sharded_model.module) if here else ()  # asked for at each step
    return {f"buffer/{name}": (buffer, Layout.whole(buffer.shape)) for name, buffer in here.items() if name in kept}


def per_element(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> JobState:
    """What the optimizer keeps for each element of the parameters here, by "KEY/NAME"."""
    found: JobState = {}
    for name, param in sharded_model.held.items():
        for key, value in optimizer_state.per_element(optimizer, param).items():
            found[f"{key}/{name}"] = (value, sharded_model.data.layouts[name])
    return found


def state(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> JobState:
    """All of it: weights, buffers, and what the optimizer keeps per element."""
    return weights(sharded_model) | buffers(sharded_model) | per_element(sharded_model, optimizer)


def scalars(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """name -> {key: value} of what the optimizer keeps once per parameter, as plain numbers or small CPU tensors."""
    return {name: optimizer_state.per_parameter(optimizer, param) for name, param in sharded_model.held.items()}


def allocate(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, Mapping[str, torch.dtype]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give `optimizer` empty state for what it updates here. kinds: name -> {key: dtype}; numbers: see `scalars`."""
    # Fused and capturable optimizers keep their counters beside the parameters.
    beside = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for name, param in sharded_model.held.items():
        for key, dtype in kinds.get(name, {}).items():
            where = getattr(optimizer, "state_device", param.device)
            empty = emptied(torch.empty(param.shape, dtype=dtype, device=where))
            optimizer_state.remember(optimizer, param, key, empty)
        for key, value in numbers.get(name, {}).items():
            # A scalar parameter's moments are numbers too, and live where it does.
            follows = isinstance(value, Tensor) and (value.ndim or (param.ndim == 0 and key != "step"))
            device = param.device if id(param) in beside or follows else "cpu"
            own = value.to(device, copy=True) if isinstance(value, Tensor) else value
            optimizer_state.remember(optimizer, param, key, own)


def bytes_per_element(
    sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, skeleton: nn.Module
) -> dict[str, dict[str, int]]:
    """name -> {"weight" or key of the optimizer's state: bytes of an element}, for every parameter of the model.

    What an optimizer keeps of one parameter, it is taken to keep of all that train.
    """
    keys = {
        key.partition("/")[0]: tensor.element_size()
        for key, (tensor, _) in per_element(sharded_model, optimizer).items()
    }
    return {
        name: {"weight": p.element_size()} | (keys if p.requires_grad else {})
        for name, p in skeleton.named_parameters()
    }
