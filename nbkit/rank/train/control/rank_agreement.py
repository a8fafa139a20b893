"""Compares what must be equal on all ranks: settings of the optimizer, seed, paths, data, constants of the model.

It gathers small digests when a run begins, at a save, a switch and an evaluation, and every EVERY steps. If they
differ, a second gather sends the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES

EVERY = 100
"""Steps between two comparisons."""

_SHOWN = 4


def compare_ranks(
    values: Mapping[str, Any], *, world_size: int, device: torch.device, what: str, hint: str = "the same on every rank"
) -> None:
    """Raise TrainingError, on every rank alike, naming the first of `values` that differs. Collective.

    what: the name of the values, in the plural.
    """
    if world_size == 1:
        return
    own = {name: repr(value) for name, value in values.items()}
    digests = all_gather_objects(zlib.crc32(repr(sorted(own.items())).encode()), world_size=world_size, device=device)
    if len(set(digests)) == 1:
        return
    everyone = all_gather_objects(own, world_size=world_size, device=device)
    names = sorted({name for each in everyone for name in each if len({other.get(name) for other in everyone}) > 1})
    shown = ", ".join(str(each.get(names[0], "none"))[:40] for each in everyone[:_SHOWN])
    raise TrainingError(
        f"The ranks have not the same {what}: {names[0]!r} differs.",
        numbers=f"on ranks 0, 1, ...: {shown}{', ...' * (world_size > _SHOWN)}; {len(names)} in all",
        hint=hint,
    )


def settings_by_name(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers and flags of each group of `optimizer`. Keys are like "lr of group 0"."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_is_number, value))):
                found[f"{key} of group {number}"] = value
    return found


def constants_of(module: nn.Module) -> dict[str, Any]:
    """Return checksums of tensors, and floats, in attributes of the parts of `module` that no state_dict holds."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in OF_MODULES:
                continue
            if isinstance(value, Tensor) and value.device.type != "meta" and value.layout == torch.strided:
                raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found[f"{path}.{name}" if path else name] = (tuple(value.shape), zlib.crc32(raw.numpy().tobytes()))
            elif isinstance(value, float):
                found[f"{path}.{name}" if path else name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
