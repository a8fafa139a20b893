"""Which parameters a role cuts, along which dim: the one list by which they are cut, and by which ties are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from nbkit.rank.parallel.tensor.plan.linear_types import adapters, core, feature_dims, is_linear
from nbkit.rank.parallel.tensor.plan.plan import Pair

Cut = tuple[nn.Module, str, int, tuple[int, ...]]
"""Module, its parameter, the dim that is cut, and the lengths of the matrices behind one another along it."""


def cuts_of_pair(model: nn.Module, pair: Pair) -> Iterator[Cut]:
    """Of all maps of `pair`; also of parameters that are None."""
    if pair.kind == "module":
        yield from cuts_of_packed(model.get_submodule(pair.owner), pair.inner)
        return
    for path in pair.columns:
        yield from cuts_of_columns(model.get_submodule(path), pair.widths[path])
    for path in pair.rows:
        yield from cuts_of_rows(model.get_submodule(path))


def cuts_of_single(part: nn.Module, role: str) -> Iterator[Cut]:
    """Of a module that is split by itself."""
    if isinstance(part, nn.Embedding) and role == "vocab":
        yield part, "weight", 0, (part.num_embeddings,)
    elif is_linear(part) and role == "rowwise_split":
        yield from cuts_of_rows(part)
    elif is_linear(part):
        yield from cuts_of_columns(part, (int(core(part).weight.shape[feature_dims(part)[1]]),))


def cuts_of_packed(part: nn.Module, inner: int) -> Iterator[Cut]:
    """Of an nn.MultiheadAttention."""
    yield part, "in_proj_weight", 0, (inner,) * 3
    yield part, "in_proj_bias", 0, (inner,) * 3
    yield part.get_submodule("out_proj"), "weight", 1, (inner,)


def cuts_of_columns(part: nn.Module, widths: Sequence[int]) -> Iterator[Cut]:
    """Of a linear map whose output features are split, and of LoRA's on it."""
    yield core(part), "weight", feature_dims(part)[1], tuple(widths)
    yield core(part), "bias", 0, tuple(widths)
    for _, _, up in adapters(part):
        yield up, "weight", 0, tuple(widths)
        yield up, "bias", 0, tuple(widths)


def cuts_of_rows(part: nn.Module) -> Iterator[Cut]:
    """Of a linear map whose input features are split, and of LoRA's on it."""
    dim = feature_dims(part)[0]
    inner = (int(core(part).weight.shape[dim]),)
    yield core(part), "weight", dim, inner
    for _, down, _ in adapters(part):
        yield down, "weight", 1, inner
