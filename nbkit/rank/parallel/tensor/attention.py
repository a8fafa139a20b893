"""Attention over a part of the heads: torch's MultiheadAttention, and the sizes that other attentions use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.parallel.tensor.layers import Around, PairState
from nbkit.rank.parallel.tensor.plan.plan import Heads, Pair
from nbkit.rank.rng.draw_plan import extent, extent_of, gathered
from nbkit.rank.torch_private import canonical_mask, dtype_of


def why_not_packed(module: nn.Module) -> str:
    """Return why an nn.MultiheadAttention cannot be split by heads, or "" if it can."""
    itself: Any = module
    if not itself._qkv_same_embed_dim:
        return "kdim or vdim differ from embed_dim"
    if itself.bias_k is not None or itself.bias_v is not None or itself.add_zero_attn:
        return "add_bias_kv and add_zero_attn append keys"
    return ""


class _Weights:
    """Replaces the attention weights, which are not gathered: each rank computed only the weights of its heads."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TrainingError(
            "Tensor parallelism does not gather the weights of an attention.", hint="need_weights=False"
        )

    def __repr__(self) -> str:
        return "<weights of an attention that is split by heads>"


class SplitAttention(Around):
    """Wrapper of an nn.MultiheadAttention. This rank holds some of its heads."""

    _link: PairState
    _heads: Heads

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Any]:
        """Compute nn.MultiheadAttention. Inputs are (B, T, D), (T, B, D) without batch_first, or (T, D)."""
        itself: Any = self.module
        link, heads = self._link, self._heads
        link.reset()
        first, count = link.team.bounds(heads.heads)[0], heads.heads // link.team.size
        inputs = [link.take(query)]
        inputs += [link.take(x, whole=x is not query) for x in (key, value)]
        batched = query.ndim == 3
        if not batched:
            inputs = [x[None] for x in inputs]
        elif not itself.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        weights = itself.in_proj_weight.chunk(3)
        biases = itself.in_proj_bias.chunk(3) if itself.in_proj_bias is not None else (None, None, None)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (count, heads.dim)).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        own = slice(first, first + count)
        mask = merged_mask(attn_mask, key_padding_mask, len(q), heads.heads, q.dtype, own)
        if is_causal and not need_weights and key_padding_mask is None:
            mask = None
        else:
            is_causal = False
        if mask is not None and mask.requires_grad:
            mask = link.take(mask, whole=True)
        drop = itself.dropout if itself.training else 0.0
        with extent("head", first, heads.heads):
            y = _attend(q, k, v, mask, drop, is_causal=is_causal, explicit=need_weights, sequence=link.sequence)
        y = y.transpose(1, 2).flatten(2)
        if not batched:
            y = y[0]
        elif not itself.batch_first:
            y = y.transpose(0, 1)
        out = itself.out_proj
        return link.end(F.linear(y, out.weight), out.bias), _Weights() if need_weights else None


def merged_mask(
    mask: Tensor | None, padding: Tensor | None, rows: int, heads: int, dtype: torch.dtype, own: slice = slice(None)
) -> Tensor | None:
    """Combine the masks of nn.MultiheadAttention into one that is added to scores: (rows or 1, own heads or 1, T, S).

    mask: (T, S) or (rows * heads, T, S). padding: (rows, S). own: the heads that are needed, if `mask` has heads.
    """
    if padding is not None:
        padding = canonical_mask(padding, "key_padding_mask", dtype_of(mask), "attn_mask", dtype)
    if mask is not None:
        mask = canonical_mask(mask, "attn_mask", None, "", dtype, False)
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.view(rows, heads, *mask.shape[-2:])[:, own]
    if padding is None:
        return mask
    keys = padding[:, None, None]
    return keys if mask is None else mask + keys


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    drop: float,
    *,
    is_causal: bool,
    explicit: bool,
    sequence: bool,
) -> Tensor:
    """Attend. explicit: use torch's steps for need_weights=True, so that dropout draws at the same place."""
    if sequence:
        with gathered("sequence"):
            return _attend(q, k, v, mask, drop, is_causal=is_causal, explicit=explicit, sequence=False)
    if explicit and extent_of("sequence") is not None:
        raise StrategyError(
            "An nn.MultiheadAttention that returns its weights cannot be split both by heads and by positions.",
            numbers="need_weights=True; tp splits the heads, and cp splits the positions",
            hint="need_weights=False; or a strategy with tp or cp alone",
        )
    if not explicit:
        return F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal)
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    return (F.dropout(weights, drop) if drop else weights) @ v


def sizes_of_part(pair: Pair | None, size: int) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of the context for the forward of the module with `pair`, on one of `size` ranks."""
    if pair is None or pair.heads is None or not pair.views:
        return nullcontext
    return partial(_SizesOfPart, pair.heads, pair.totals, size)


class _SizesOfPart(TorchFunctionMode):
    """Mode for an attention whose code uses the sizes of all heads, as in `y.view(B, T, C)`.

    It replaces them by the sizes of a part, but only if the tensor is `size` times smaller than the requested shape.
    The proof has run the attention in this mode.
    """

    def __init__(self, heads: Heads, widths: Iterable[int], size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.totals = {heads.heads, heads.kv_heads, *widths}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and len(args) > 1:
            shape = args[1:] if isinstance(args[1], int) else args[1]
            if isinstance(shape, tuple | list):
                args = (args[0], self._shape(args[0].numel(), shape, 2))
        elif func in _UNFLATTEN and len(args) == 3:
            args = (*args[:2], self._shape(args[0].shape[args[1]], args[2], 0))
        elif func in _SPLIT and len(args) > 1:
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            args = (args[0], self._lengths(args[0].shape[dim], args[1]), *args[2:])
        return func(*args, **kwargs)

    def _shape(self, number: int, shape: Sequence[int], first: int) -> tuple[int, ...]:
        """Return `shape` changed for the `number` elements of a part.

        first: the first dim, apart from the last, that may be divided. The dims before it are rows and positions.
        """
        asked, known = list(shape), math.prod(n for n in shape if n != -1)
        among = self.totals
        if -1 in shape:
            if known <= 0 or number * self.size != known * self.heads.dim:
                return tuple(shape)
            among = {self.heads.heads, self.heads.kv_heads}
        elif known != number * self.size:
            return tuple(shape)
        for i, n in enumerate(shape):
            if (i >= first or i == len(shape) - 1) and n in among and n % self.size == 0:
                asked[i] = n // self.size
                break
        return tuple(asked)

    def _lengths(self, length: int, asked: Any) -> Any:
        if isinstance(asked, int):
            whole = asked in self.totals and asked % self.size == 0 and length * self.size in self.totals
            return asked // self.size if whole else asked
        return [n // self.size for n in asked] if sum(asked) == length * self.size else asked


_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
_UNFLATTEN = {Tensor.unflatten, torch.unflatten}
_SPLIT = {Tensor.split, torch.split}
