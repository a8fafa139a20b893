"""Carry a user's changes of the model to the next sharded model: frozen parameters, train or eval mode, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.torch_private import DropoutNd


class Changes(NamedTuple):
    """Changes by the user.

    trained: name of a parameter -> requires_grad. modes: path of a module -> training. drops: path of a module -> p of
    its dropout.
    """

    trained: dict[str, bool]
    modes: dict[str, bool]
    drops: dict[str, float]


def changes_of(sharded_model: ShardedModel, skeleton: nn.Module) -> Changes:
    """Return how the module of `sharded_model` differs from `skeleton`. A pipeline stage knows only its own blocks."""
    params, parts = dict(skeleton.named_parameters()), dict(skeleton.named_modules())
    modes: dict[str, bool] = {}
    drops: dict[str, float] = {}
    for path, part in sharded_model.module.named_modules():
        if (known := parts.get(path)) is None:
            continue
        dropping = _drops(part) and _drops(known) and part.p != known.p
        if (part.training != known.training or dropping) and sharded_model.runs(f"{path}."):
            modes |= {path: part.training} if part.training != known.training else {}
            drops |= {path: part.p} if dropping else {}
    held = sharded_model.data.held
    trained = {name: p.requires_grad for name, p in held.items() if p.requires_grad != params[name].requires_grad}
    return Changes(trained, modes, drops)


def follow(everyone: Sequence[Changes], skeleton: nn.Module) -> bool:
    """Apply the changes of all ranks to `skeleton`. Return True if there are any."""
    params, parts = dict(skeleton.named_parameters()), dict(skeleton.named_modules())
    for changes in everyone:
        for name, trained in changes.trained.items():
            params[name].requires_grad_(trained)
        for path, training in changes.modes.items():
            parts[path].training = training
        for path, p in changes.drops.items():
            parts[path].p = p
    return any(any(changes) for changes in everyone)


def _drops(part: nn.Module) -> bool:
    return isinstance(part, DropoutNd)
