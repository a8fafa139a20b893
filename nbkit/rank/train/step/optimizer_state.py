"""What an optimizer remembers: of each parameter, in its groups and in attributes; with the optimizers within it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = MutableMapping[Any, dict[str, Any]]

# How an optimizer computes is this run's business; what it computes is the checkpoint's.
OWN_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
_BESIDE = "beside the groups"  # a key of the first group's settings
_OF_TORCH = ("_step_count",)  # of an LR scheduler


def states_of(optimizer: Optimizer, optimizers: Iterable[Optimizer] = ()) -> list[State]:
    """Return the state of `optimizer` and those of the optimizers within it, each once.

    optimizers: within it; those that the Template noted are known.
    """
    every = [optimizer, *(optimizers or vars(optimizer).get("_within", ()))]
    return list({id(each.state): each.state for each in every}.values())


def numbered(number: int, key: str) -> str:
    """Return the name of what state `number` holds as `key`: of the first state, the key itself."""
    return f"{number}.{key}" if number else key


def remembered(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return all that is remembered of `param`, by numbered key."""
    # Without asking the defaultdict, which would make an entry, and the optimizer takes that for its own.
    return {
        numbered(number, key): value
        for number, state in enumerate(states_of(optimizer))
        if param in state
        for key, value in state[param].items()
    }


def per_element(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """Return what is remembered of each element of `param`."""
    return {key: value for key, value in remembered(optimizer, param).items() if _follows(value, param)}


def per_parameter(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return what is remembered once of `param`: copies, tensors on the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in remembered(optimizer, param).items()
        if not _follows(value, param)
    }


def _follows(value: Any, param: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.ndim > 0


def remember(optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> None:
    """Put `value` where `remembered` finds it as `key`."""
    first, _, rest = key.partition(".")
    number, own = (int(first), rest) if first.isdigit() and rest else (0, key)
    states_of(optimizer)[number].setdefault(param, {})[own] = value


def forget(optimizer: Optimizer) -> None:
    """Clear every state."""
    for state in states_of(optimizer):
        state.clear()


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group (learning rate, betas, ...) as plain numbers.

    With those of the first group go the numbers that the optimizer keeps in attributes, and all this of the optimizers
    within it, where there are any.
    """
    settings = _settings(optimizer)
    beside: list[dict[str, Any]] = [{"attributes": _attributes(optimizer)}]
    for each in vars(optimizer).get("_within", ()):
        beside.append({"attributes": _attributes(each), "groups": _settings(each)})
    if settings and any(len(one["attributes"]) + len(one.get("groups", ())) for one in beside):
        settings[0][_BESIDE] = beside
    return settings


def take_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set what `settings_of` gave."""
    beside = settings[0].get(_BESIDE, ()) if settings else ()
    for each, own in zip([optimizer, *vars(optimizer).get("_within", ())], beside, strict=False):
        _set(each, own.get("groups", ()))
        for name, value in own["attributes"].items():
            before = vars(each).get(name)
            vars(each)[name] = torch.full_like(before, value) if isinstance(before, Tensor) else value
    _set(optimizer, settings)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, settings, strict=bool(settings)):
        for key, value in saved.items():
            if key in (*OWN_SETTINGS, _BESIDE):
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers that its class keeps in attributes; what torch notes in some is true or false of this run."""
    return {
        name: _plain(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if name not in _OF_TORCH and not (name.startswith("_") and isinstance(value, bool))
    }


def _plain(value: Any) -> Any:
    """Return numbers of numpy and tensors with one element as Python's: a checkpoint is read without their code."""
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.cpu()
    return value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value
