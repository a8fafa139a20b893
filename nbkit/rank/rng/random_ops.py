"""torch's functions that draw random numbers, once more, with numbers that are given instead of drawn.

`RANDOM[f]` does what f does. It is called with f itself, `Numbers`, then f's own arguments. f runs first, for the
shape, dtype and device of what it gives, and its values are then replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Numbers(Protocol):
    """Random numbers of one draw, of the shape and on the device of a tensor."""

    def uniform(self, like: Tensor) -> Tensor:
        """From [0, 1)."""

    def normal(self, like: Tensor) -> Tensor:
        """Of mean 0 and variance 1."""

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """From [low, high), int64."""


Given = Callable[..., Any]


def _filled(func: Given, args: Any, kwargs: dict[str, Any], values: Callable[[Tensor], Tensor]) -> Any:
    made = func(*args, **kwargs)
    if isinstance(made, Tensor) and made.numel() and not made.is_complex() and not made.is_meta:
        with torch.no_grad():
            made.copy_(values(made))
    return made


def _uniform(func: Given, numbers: Numbers, *args: Any, **kwargs: Any) -> Any:
    return _filled(func, args, kwargs, numbers.uniform)


def _standard_normal(func: Given, numbers: Numbers, *args: Any, **kwargs: Any) -> Any:
    return _filled(func, args, kwargs, numbers.normal)


def _normal(func: Given, numbers: Numbers, *args: Any, **kwargs: Any) -> Any:
    mean, std, *_ = *args, *(kwargs[name] for name in ("mean", "std") if name in kwargs), 1.0
    return _filled(func, args, kwargs, lambda made: mean + std * numbers.normal(made))


def _normal_(func: Given, numbers: Numbers, input: Tensor, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> Any:
    return _filled(func, (input, mean, std), kwargs, lambda made: mean + std * numbers.normal(made))


def _uniform_(func: Given, numbers: Numbers, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("from", "to"), args, strict=False)) | kwargs
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _filled(func, (input, *args), kwargs, lambda made: low + (high - low) * numbers.uniform(made))


def _exponential_(func: Given, numbers: Numbers, input: Tensor, lambd: float = 1.0, **kwargs: Any) -> Any:
    # As torch: never 0, of which gumbel noise takes the logarithm.
    least = torch.finfo(input.dtype).tiny
    return _filled(
        func, (input, lambd), kwargs, lambda made: (-torch.log1p(-numbers.uniform(made))).clamp(min=least) / lambd
    )


def _bernoulli(func: Given, numbers: Numbers, input: Tensor, p: Any = None, **kwargs: Any) -> Any:
    args = (input,) if p is None else (input, p)
    chance = input.detach().clone() if p is None else p
    return _filled(func, args, kwargs, lambda made: _below(numbers, made, chance))


def _bernoulli_(func: Given, numbers: Numbers, input: Tensor, p: Any = 0.5, **kwargs: Any) -> Any:
    return _filled(func, (input, p), kwargs, lambda made: _below(numbers, made, p))


def _below(numbers: Numbers, made: Tensor, chance: Any) -> Tensor:
    below: Tensor = numbers.uniform(torch.empty(made.shape, device=made.device)) < chance
    return below


def _integers(func: Given, numbers: Numbers, *args: Any, **kwargs: Any) -> Any:
    """randint(high, size), randint(low, high, size), randint_like(input, ...), and these by name."""
    bounds = [arg for arg in args if isinstance(arg, int)] + [
        kwargs[name] for name in ("low", "high") if name in kwargs
    ]
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return _filled(func, args, kwargs, lambda made: numbers.integers(made, int(low), int(high)))


def _gumbel_softmax(
    _: Given,
    numbers: Numbers,
    logits: Tensor,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    drawn = -torch.log1p(-numbers.uniform(logits.detach()))
    noise = -drawn.clamp(min=torch.finfo(logits.dtype).tiny).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0)
    return chosen - soft.detach() + soft


RANDOM: dict[Any, Given] = {
    torch.rand: _uniform,
    torch.rand_like: _uniform,
    torch.randn: _standard_normal,
    torch.randn_like: _standard_normal,
    torch.normal: _normal,
    torch.randint: _integers,
    torch.randint_like: _integers,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    F.gumbel_softmax: _gumbel_softmax,
}
