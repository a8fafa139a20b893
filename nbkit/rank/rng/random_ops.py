"""Versions of torch's random functions and dropout functions that use given numbers or masks instead of drawing.

`RANDOM[f]` replaces the random function f. Its arguments are f itself, `Numbers`, then f's own arguments. It runs f
first, to get the shape, dtype and device of the result, and then replaces the values.

`DRAWS[f]` replaces the dropout function f. Its arguments are f itself, a mask, then f's own arguments. Attention with
dropout is computed by the plain formula, with the probabilities in memory, because no fused kernel accepts a dropout
mask. The fused kernel is used only if it may draw its own mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import TrainingError
from nbkit.rank.torch_private import safe_softmax


class Numbers(Protocol):
    """The random numbers of one draw, with the shape and device of the tensor `like`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1)."""

    def normal(self, like: Tensor) -> Tensor:
        """Return normal numbers of mean 0 and variance 1."""

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """Return int64 numbers in [low, high)."""


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
    # As in torch, the result is never 0, because Gumbel noise takes its logarithm.
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
    """Replace randint(high, size), randint(low, high, size) and randint_like(input, ...), also with keywords."""
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


class Mask(Protocol):
    """A function (shape, p) -> bool mask, True for dropped elements."""

    def __call__(self, shape: Sequence[int], p: float, /) -> Tensor: ...


class AttentionMask(Mask, Protocol):
    """A mask that the attention kernel may draw itself."""

    def in_kernel(self, device: torch.device) -> AbstractContextManager[None] | None:
        """Return a context in which the attention kernel may draw the mask on `device`; None if it must not."""
        ...


Draw = Callable[..., Any]


def _scaled(x: Tensor, mask: Tensor, p: float, inplace: bool) -> Tensor:
    """Return `x` with the elements in `mask` set to 0, and the others scaled to keep the expectation."""
    if p >= 1:
        return x.mul_(0) if inplace else x * 0
    return (x.mul_(1 / (1 - p)) if inplace else x * (1 / (1 - p))).masked_fill_(mask, 0)


def _dropout(
    _: Draw, mask: Mask, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0 or input.numel() == 0:
        return input
    return _scaled(input, mask(input.shape, p), p, inplace)


def _dropout_(func: Draw, mask: Mask, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(func, mask, input, p, train, inplace=True)


def _channels(
    _: Draw, mask: Mask, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drop whole channels of (B, C, ...)."""
    return _dropout(_, _of_channels(mask), input, p, training, inplace)


def _of_channels(mask: Mask) -> Callable[[Sequence[int], float], Tensor]:
    def whole(shape: Sequence[int], p: float) -> Tensor:
        return mask(shape[:2], p).view(*shape[:2], *(1 for _ in shape[2:]))

    return whole


def _alpha(_: Draw, mask: Mask, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _self_normalising(input, mask(input.shape, p) if training and p else None, p, inplace)


def _alpha_channels(
    _: Draw, mask: Mask, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _alpha(_, _of_channels(mask), input, p, training, inplace)


def _self_normalising(x: Tensor, mask: Tensor | None, p: float, inplace: bool) -> Tensor:
    """Apply alpha dropout (Klambauer et al. 2017): set dropped elements to SELU's minimum; keep mean and variance."""
    if mask is None:
        return x
    if p >= 1:
        return x.mul_(0) if inplace else x * 0
    bound = -1.7580993408473766
    scale = ((1 - p) * (1 + p * bound**2)) ** -0.5
    kept = x.mul_(scale) if inplace else x * scale
    return kept.masked_fill_(mask, bound * scale).add_(-scale * p * bound)


def _attention(
    func: Draw,
    mask: AttentionMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: (..., H, T, E), (..., H, S, E), (..., H, S, V) -> (..., H, T, V)."""
    # With zero heads, as in the trial of a split, the kernel of torch 2.11 divides by zero, which ends the process.
    has_heads = all(tensor.shape[-3:-2].numel() for tensor in (query, key))
    if dropout_p == 0 and has_heads:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    if (drawing := mask.in_kernel(query.device)) is not None:
        with drawing:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if allowed else scores + attn_mask
    if torch.is_autocast_enabled(scores.device.type) and scores.dtype.itemsize < 4:
        # Autocast computes this softmax in float32 too, but its backward would mix dtypes, which CUDA refuses.
        scores = scores.float()
    # As in torch, a row that is completely masked gives zeros and not NaN.
    weights = safe_softmax(scores, -1)
    return _scaled(weights, mask(weights.shape, dropout_p), dropout_p, inplace=False).to(value.dtype) @ value


def _multi_head(func: FunctionType, mask: AttentionMask, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own code with the versions of `dropout` and `scaled_dot_product_attention` in this module."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(F.dropout, mask, input, p, training, inplace)

    def attention(*inner: Any, **named: Any) -> Tensor:
        return _attention(F.scaled_dot_product_attention, mask, *inner, **named)

    names = func.__globals__ | {"dropout": dropout, "scaled_dot_product_attention": attention}
    # The call was already dispatched. A second dispatch would pass the original function to an outer mode, such as that
    # of torch.set_default_device.
    names["has_torch_function"] = lambda _: False
    rebound = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    rebound.__kwdefaults__ = func.__kwdefaults__
    return rebound(*args, **kwargs)


def _recurrent(func: Draw, mask: Mask, *args: Any, **kwargs: Any) -> Any:
    """Raise TrainingError if nn.LSTM, nn.GRU or nn.RNN drops between its layers, inside a kernel; else run it."""
    # (input, hx, weights, biases, layers, dropout, train, ...); for packed rows (data, batch_sizes, hx, weights, ...).
    at = 6 if isinstance(args[3], list | tuple) else 5
    dropout, train = args[at : at + 2]
    if not train or dropout == 0:
        return func(*args, **kwargs)
    raise TrainingError(
        "A recurrent layer applies dropout inside its kernel, so the dropped elements would depend on the strategy.",
        numbers=f"dropout {dropout:g}",
        hint="single-layer nn.LSTM modules with nn.Dropout between them",
    )


DRAWS: dict[Any, Draw] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: _dropout_,
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    torch.feature_dropout: _channels,
    F.alpha_dropout: _alpha,
    torch.alpha_dropout: _alpha,
    F.feature_alpha_dropout: _alpha_channels,
    torch.feature_alpha_dropout: _alpha_channels,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
