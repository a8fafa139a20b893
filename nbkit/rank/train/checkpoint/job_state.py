"""Collect this rank's part of a job's state, under keys that are the same on every rank and under every strategy.

The keys are "weight/NAME", "buffer/NAME", and "KEY/NAME" for optimizer state per element of a parameter (exp_avg,
momentum_buffer, ...). Optimizer state per parameter (step) is separate.

`everyone` gathers a description of the state of all ranks. `shares` decides which rank writes which box, each box once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nbkit.planner.exchange import halves, held, uncovered
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.parallel.module.batch_norm import kept_buffers
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.step import optimizer_state
from nbkit.tensor_layout import Box, Layout

JobState = dict[str, tuple[Tensor, Layout]]


def weights(sharded_model: ShardedModel) -> JobState:
    """Return this rank's weights: "weight/NAME" -> (tensor, layout)."""
    return {
        f"weight/{name}": (tensor.detach(), layout) for name, (tensor, layout) in sharded_model.data.weights.items()
    }


@torch.no_grad()
def not_finite(sharded_model: ShardedModel) -> list[str]:
    """Return the names of trainable weights in which this rank holds a NaN or an infinity. Waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, p in sharded_model.held.items():
        if p.requires_grad and p.numel() and p.element_size() > 1:  # there is no norm of one-byte dtypes
            alike.setdefault((p.device, p.dtype), {})[name] = p
    found: list[str] = []
    for some in alike.values():
        largest = torch.stack(torch._foreach_norm(list(some.values()), torch.inf))
        found += [name for name, good in zip(some, largest.isfinite().tolist(), strict=True) if not good]
    return found


def buffers(sharded_model: ShardedModel) -> JobState:
    """Return the buffers to save, of the modules that run on this rank: "buffer/NAME" -> (whole buffer, layout)."""
    here = {name: buffer for name, buffer in sharded_model.module.named_buffers() if sharded_model.runs(name)}
    kept = kept_buffers(sharded_model.module) if here else ()  # this function runs at each step
    return {f"buffer/{name}": (buffer, Layout.whole(buffer.shape)) for name, buffer in here.items() if name in kept}


def per_element(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> JobState:
    """Return the optimizer state per element of this rank's parameters: "KEY/NAME" -> (tensor, layout)."""
    found: JobState = {}
    for name, param in sharded_model.held.items():
        for key, value in optimizer_state.per_element(optimizer, param).items():
            found[f"{key}/{name}"] = (value, sharded_model.layouts[name])
    return found


def state(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> JobState:
    """Return the whole state of this rank: weights, buffers, and optimizer state per element."""
    return weights(sharded_model) | buffers(sharded_model) | per_element(sharded_model, optimizer)


def scalars(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the other optimizer state of each parameter: name -> {key: plain number or small CPU tensor}."""
    return {name: optimizer_state.per_parameter(optimizer, param) for name, param in sharded_model.held.items()}


def allocate(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, Mapping[str, torch.dtype]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Allocate state in `optimizer` for this rank's parameters. kinds: name -> {key: dtype}; numbers: see `scalars`.

    A checkpoint's average of weights is left out if this training keeps no average.
    """
    # Fused and capturable optimizers keep their counters on the device of the parameters.
    beside = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for name, param in sharded_model.held.items():
        for key, dtype in kinds.get(name, {}).items():
            if not optimizer_state.has_place(optimizer, key):
                continue
            where = getattr(optimizer, "state_device", param.device)
            empty = emptied(torch.empty(param.shape, dtype=dtype, device=where))
            optimizer_state.remember(optimizer, param, key, empty)
        for key, value in numbers.get(name, {}).items():
            if not optimizer_state.has_place(optimizer, key):
                continue
            # The moments of a scalar parameter are numbers too. They are on the device of the parameter.
            follows = isinstance(value, Tensor) and (value.ndim or (param.ndim == 0 and key != "step"))
            device = param.device if id(param) in beside or follows else "cpu"
            own = value.to(device, copy=True) if isinstance(value, Tensor) else value
            optimizer_state.remember(optimizer, param, key, own)


def bytes_per_element(
    sharded_model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    skeleton: nn.Module,
    groups: Sequence[Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Return name -> {"weight" or key of optimizer state: bytes per element}, for every parameter of the model.

    groups: the names of the parameters in each group. The function assumes that the optimizer keeps the same state for
    all trained parameters of a group.
    """
    kept = {key: tensor.element_size() for key, (tensor, _) in per_element(sharded_model, optimizer).items()}
    params = dict(skeleton.named_parameters())
    keys = alike_in_groups(kept, groups, [name for name, p in params.items() if p.requires_grad])
    return {name: {"weight": p.element_size()} | keys.get(name, {}) for name, p in params.items()}


V = TypeVar("V")


def alike_in_groups(
    kept: Mapping[str, V], groups: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, dict[str, V]]:
    """Return name -> {key: value} for `names`, extended from the parameters of this rank to all of their groups.

    kept: "KEY/NAME" -> value. groups: see bytes_per_element. A group without a parameter on this rank gets the keys of
    all other groups.
    """
    found = [key.partition("/") for key in kept]
    of_all = {key: kept[f"{key}/{name}"] for key, _, name in found}
    of_group: dict[str, dict[str, V]] = {}
    for members in map(frozenset, groups):
        here = {key: kept[f"{key}/{name}"] for key, _, name in found if name in members}
        of_group.update(dict.fromkeys(members, here or of_all))
    return {name: of_group.get(name, of_all) for name in names}


_BOX_BYTES = 64 << 20
"""Larger boxes are saved in several parts. So reading a small part of a tensor reads little else."""


@dataclass(frozen=True)
class Everyone:
    """A description of the state of all ranks.

    layouts: for each rank, key -> layout. kinds: key -> dtype. numbers: see `scalars`.
    """

    layouts: tuple[Mapping[str, Layout], ...]
    kinds: Mapping[str, torch.dtype]
    numbers: Mapping[str, Mapping[str, Any]]


def everyone(
    own: JobState, numbers: Mapping[str, Mapping[str, Any]], world_size: int, device: torch.device
) -> Everyone:
    """Describe the state of all ranks. Collective: one all-gather of layouts and numbers."""
    # Equal layouts become one object. It is pickled once, and receivers can compare layouts by identity.
    known: dict[Layout, Layout] = {}
    layouts = {key: known.setdefault(layout, layout) for key, (_, layout) in own.items()}
    mine = layouts, {key: tensor.dtype for key, (tensor, _) in own.items()}, numbers
    found = all_gather_objects(mine, world_size=world_size, device=device)
    return Everyone(
        tuple({key: known.setdefault(layout, layout) for key, layout in one.items()} for one, _, _ in found),
        {key: kind for _, kinds, _ in found for key, kind in kinds.items()},
        {name: values for _, _, all_numbers in found for name, values in all_numbers.items()},
    )


def by_name(kinds: Mapping[str, torch.dtype]) -> dict[str, dict[str, torch.dtype]]:
    """Select the optimizer state from the dtypes of all tensors: return name -> {key: dtype}."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for key, dtype in kinds.items():
        kind, _, name = key.partition("/")
        if kind not in ("weight", "buffer"):
            found.setdefault(name, {})[kind] = dtype
    return found


def counted_once(layouts: Sequence[Mapping[str, Layout]]) -> list[dict[str, Layout]]:
    """Return `layouts` (one dict per rank) with each buffer only at the first rank that has it.

    Buffers that a forward pass changes may differ between ranks. Those of the first rank count.
    """
    given: set[str] = set()
    found = []
    for each in layouts:
        buffers = {key for key in each if key.startswith("buffer/")}
        found.append({key: layout for key, layout in each.items() if key not in buffers & given})
        given |= buffers
    return found


def shares(every: Everyone, rank: int) -> dict[str, list[Box]]:
    """Return key -> the boxes that `rank` writes.

    Every element is written once, by the rank with the fewest bytes to write so far among those that hold it. The ranks
    compute the same result without messages.
    """
    load = [0] * len(every.layouts)
    cells: dict[tuple[int, ...], list[tuple[Box, tuple[int, ...]]]] = {}
    mine: dict[str, list[Box]] = {}
    for key in sorted({key for layouts in every.layouts for key in layouts}):
        spread = [layouts.get(key) for layouts in every.layouts]
        size = every.kinds[key].itemsize
        alike = (size, *map(id, spread))
        if alike not in cells:
            cells[alike] = _cells(spread, _BOX_BYTES // size)
        for box, ranks in cells[alike]:
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += box.numel * size
            if writer == rank:
                mine.setdefault(key, []).append(box)
    return mine


def _cells(spread: Sequence[Layout | None], most: int) -> list[tuple[Box, tuple[int, ...]]]:
    """Return (box, ranks that hold it) for disjoint boxes of at most `most` elements that cover the tensor."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, tuple[int, ...]]] = []
    taken: list[Box] = []
    for box, ranks in holders.items():
        found += [(part, tuple(ranks)) for rest in uncovered((box,), taken) for part in halves(rest, most)]
        taken.append(box)
    return found
