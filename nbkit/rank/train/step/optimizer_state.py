"""What an optimizer remembers of each parameter, with what optimizers within it remember."""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

State = MutableMapping[Any, dict[str, Any]]


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
