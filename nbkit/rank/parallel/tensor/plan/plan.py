"""The plan of a tensor axis: which modules are split, and how.

A plan has three sources, of which later ones override earlier ones: the module tree (choose_plan.py), a HF model's own
plan, and the user's `tp_plan`. It is made from the whole model, before a pipeline drops parts of it, so that all stages
agree.

This module also finds the number of heads of an attention and the attributes that contain it, and lists which
parameters each role splits along which dim. The same list is used to split parameters and to compare tied weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.block_discovery import mixtures, within
from nbkit.rank.parallel.tensor.plan.linear_types import adapters, core, feature_dims, is_linear

_HEADS = {"heads", "num_heads", "n_heads", "n_head", "nhead", "nheads", "num_head", "num_attention_heads"}
_HEADS |= {"n_local_heads", "num_q_heads", "num_query_heads", "q_heads", "n_q_heads", "head_count", "head_num"}
_KV_HEADS = {"kv_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads", "n_local_kv_heads"}
_HEAD_DIM = {"head_dim", "head_size", "d_head", "dim_head", "attention_head_size", "d_k", "size_per_head", "head_width"}
_WIDTHS = {
    "split_size",
    "embed_dim",
    "n_embd",
    "n_embed",
    "all_head_size",
    "inner_dim",
    "hidden_size",
    "d_model",
    "dim",
}
_WIDTHS |= {"width", "embedding_dim", "inner_size", "q_size", "kv_size", "q_dim", "kv_dim", "attn_dim", "emb_dim"}


@dataclass(frozen=True)
class Heads:
    """Number of query heads, number of key-value heads, and features per head."""

    heads: int
    kv_heads: int
    dim: int


def heads_of(owner: nn.Module, *, q: int, k: int) -> Heads | None:
    """Return the heads of an attention from its own attributes or its config, or None if neither has them.

    q, k: number of output features of its query and key projections.
    """
    counts = [value for _, name, value in _numbers(owner) if name in _HEADS and value > 0 and q % value == 0]
    dims = [value for _, name, value in _numbers(owner) if name in _HEAD_DIM and value > 0 and q % value == 0]
    dim = dims[0] if dims else q // counts[0] if counts else 0
    return Heads(q // dim, k // dim, dim) if dim and k % dim == 0 else None


def counts_heads(owner: nn.Module) -> bool:
    """Return True if an attribute of the module itself gives its number of heads."""
    return any(not home and name in _HEADS for home, name, _ in _numbers(owner))


def named_counts(owner: nn.Module, heads: Heads) -> tuple[str, ...]:
    """Return the attributes of `owner` and its configs that by name and value count heads, or features of all heads."""
    parts = {**dict.fromkeys(_HEADS, heads.heads), **dict.fromkeys(_KV_HEADS, heads.kv_heads)}
    widths = {heads.heads * heads.dim, heads.kv_heads * heads.dim}
    return tuple(
        f"{home}.{name}" if home else name
        for home, name, value in _numbers(owner)
        if (name in parts and value in (heads.heads, heads.kv_heads))
        or (not home and name in _WIDTHS and value in widths)
    )


def numbers_in(owner: nn.Module, values: Collection[int], reads: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the attributes of the modules in `owner`, and of their configs, that equal one of `values` and are read.

    reads: path of a module in `owner` -> its own attributes that are read while it runs.
    """
    return tuple(
        (f"{path}:" if path else "") + (f"{home}.{name}" if home else name)
        for path, part in owner.named_modules()
        for home, name, value in _numbers(part)
        if value in values and (home or name) in reads.get(path, ())
    )


def of_configs(counts: Iterable[str]) -> set[str]:
    """Return the `counts` that are attributes of a config."""
    return {count for count in counts if "." in count.rpartition(":")[2]}


def divide(owner: nn.Module, counts: Iterable[str], size: int) -> None:
    """Divide the attributes `counts` of `owner` and of modules in it by `size`. A config is copied first."""
    copied: dict[tuple[str, str], Any] = {}
    for count in counts:
        path, _, attribute = count.rpartition(":")
        holder, _, name = attribute.rpartition(".")
        target: Any = owner.get_submodule(path)
        if holder:
            if (path, holder) not in copied:
                shared = vars(target)[holder]
                copied[path, holder] = copy.copy(shared)
                for key, value in list(vars(target).items()):
                    if value is shared:
                        vars(target)[key] = copied[path, holder]
            target = copied[path, holder]
        # This also changes frozen dataclasses, which is safe because the copy belongs to nbkit.
        object.__setattr__(target, name, getattr(target, name) // size)


def _numbers(owner: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yield (name of the attribute with the config or "", name, value) of each int. Own attributes come first."""
    configs: list[tuple[str, Any]] = []
    for name, value in list(vars(owner).items()):
        if type(value) is int:
            yield "", name, value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value):
            configs += [(name, value)] if all(value is not config for _, config in configs) else []
    for home, config in configs:
        for name, value in list(vars(config).items()):
            if type(value) is int:
                yield home, name, value


ROLES = {
    "colwise": "output features split, first of a pair",
    "packed": "as colwise, for query, key and value (or gate and up) behind one another in one matrix",
    "rowwise": "input features split, last of a pair; summed over the ranks",
    "colwise_gather": "output features split, gathered at once: right for any linear map",
    "rowwise_split": "input features split, of an input that has all: right for any linear map",
    "vocab": "rows of an embedding split",
    "head": "the map to the vocabulary, whose loss is computed in parts",
    "replicate": "left as it is",
}
"""Roles that `tp_plan={'blocks.*.mlp.up': 'colwise'}` may give to a module. * matches any characters."""

_HF = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
    "replicated": "replicate",
}


@dataclass(frozen=True)
class Pair:
    """Maps that split features and one that joins them, inside the module `owner`.

    kind: "attention" (split by heads), "mlp" (by features), or "module" (an nn.MultiheadAttention with its own maps).
    widths: column map -> features of each matrix packed in it. inner: number of features between the maps. counts:
    attributes of the owner, and of modules in it, that a rank divides. views: the code of the attention requests the
    sizes of all heads, and must get those of a part. taken: arguments of the attention other than the hidden states get
    gradients from between its maps.
    """

    owner: str
    kind: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    widths: Mapping[str, tuple[int, ...]]
    inner: int
    heads: Heads | None = None
    counts: tuple[str, ...] = ()
    views: bool = False
    taken: bool = True

    @property
    def totals(self) -> tuple[int, ...]:
        """Return the numbers of features of all heads: of each packed matrix, and of each matrix that packs several."""
        widths = [n for each in self.widths.values() for n in (*each, sum(each))]
        return tuple(dict.fromkeys([self.inner, *widths]))


@dataclass(frozen=True)
class TensorPlan:
    """Plan of a tensor axis, printed by `describe`.

    pairs: the pairs to split. singles: path of a single module -> its role. reasons: path of a module -> why it stays
    whole. partial: parameters used between the maps of a pair. positions: block -> why its positions stay whole.
    unproven: module that looks splittable -> why that is not known to be correct. ways: row map -> possible splits of
    its pair, from which a run chooses. instead: map in a pair -> its role if the pair is not correct.
    """

    size: int
    pairs: tuple[Pair, ...]
    singles: Mapping[str, str]
    reasons: Mapping[str, str]
    partial: frozenset[str] = frozenset()
    positions: Mapping[str, str] = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)
    ways: Mapping[str, tuple[Pair, ...]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def describe(self, module: nn.Module) -> list[tuple[str, str, str]]:
        """Return (module, how it is split, why it is not) for modules with parameters. Numbers in paths become *."""
        how: dict[str, str] = dict(self.singles)
        for pair in self.pairs:
            what = f"{pair.heads.heads} heads over {self.size}" if pair.heads else f"{pair.inner} over {self.size}"
            how |= dict.fromkeys(pair.columns, f"columns: {what}") | dict.fromkeys(pair.rows, f"rows: {what}")
            if pair.kind == "module":
                how[pair.owner] = f"heads: {what}"
        rows: dict[tuple[str, str, str], None] = {}
        for path, part in module.named_modules():
            above = [p for p in how if path == p or path.startswith(f"{p}.")]
            if path in how or (any(p is not None for p in part._parameters.values()) and not above):
                about = [p for p in self.reasons if path == p or path.startswith(f"{p}.")]
                reason = self.reasons[max(about, key=len)] if about else ""
                rows[folded(path), how.get(path, "whole"), "" if path in how else reason] = None
        return list(rows)


def by_itself(path: str) -> str:
    """Return the key of a map outside of its pair. The key of the pair is the path of its row map."""
    return f"{path} by itself"


def folded(path: str) -> str:
    """Return `path` with * for the numbers in it, so that all modules of a list have one path."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def matches(path: str, pattern: str) -> bool:
    """Return True if `pattern` matches the module at `path`."""
    return path == pattern or fnmatchcase(path, pattern)


def roles_of_hf(model: nn.Module) -> dict[str, str]:
    """Return path -> role from the plan of a HF model (`_tp_plan`), with nbkit's names of roles.

    Mixtures of experts are left out, because they stay whole. Raises StrategyError for an unknown role.
    """
    found: dict[str, str] = {}
    for top, part in model.named_modules():
        own = getattr(part, "_tp_plan", None)
        if not isinstance(own, Mapping) or not own or not hasattr(part, "config"):
            continue
        prefix, experts = f"{top}." if top else "", mixtures(part)
        for path, _ in part.named_modules():
            if within(path, experts):
                continue
            for pattern, role in own.items():
                if matches(path, pattern) and role not in _HF:
                    raise StrategyError(
                        f"The model's own plan splits {prefix}{path} by {role!r}, which nbkit does not support.",
                        numbers=f"{pattern}: {role}",
                        hint="a strategy without tp",
                    )
                if matches(path, pattern):
                    found.setdefault(prefix + path, _HF[role])
        break
    return found


Cut = tuple[nn.Module, str, int, tuple[int, ...]]
"""Module, name of its parameter, dim that is split, and lengths of the concatenated matrices along that dim."""


def cuts_of_pair(model: nn.Module, pair: Pair) -> Iterator[Cut]:
    """Yield the cuts of all maps of `pair`, including those of parameters that are None."""
    if pair.kind == "module":
        yield from cuts_of_packed(model.get_submodule(pair.owner), pair.inner)
        return
    for path in pair.columns:
        yield from cuts_of_columns(model.get_submodule(path), pair.widths[path])
    for path in pair.rows:
        yield from cuts_of_rows(model.get_submodule(path))


def cuts_of_single(part: nn.Module, role: str) -> Iterator[Cut]:
    """Yield the cuts of a module that is split without a pair."""
    if isinstance(part, nn.Embedding) and role == "vocab":
        yield part, "weight", 0, (part.num_embeddings,)
    elif is_linear(part) and role == "rowwise_split":
        yield from cuts_of_rows(part)
    elif is_linear(part):
        yield from cuts_of_columns(part, (int(core(part).weight.shape[feature_dims(part)[1]]),))


def cuts_of_packed(part: nn.Module, inner: int) -> Iterator[Cut]:
    """Yield the cuts of an nn.MultiheadAttention."""
    yield part, "in_proj_weight", 0, (inner,) * 3
    yield part, "in_proj_bias", 0, (inner,) * 3
    yield part.get_submodule("out_proj"), "weight", 1, (inner,)


def cuts_of_columns(part: nn.Module, widths: Sequence[int]) -> Iterator[Cut]:
    """Yield the cuts of a linear map whose output features are split, and of the LoRA adapters on it."""
    yield core(part), "weight", feature_dims(part)[1], tuple(widths)
    yield core(part), "bias", 0, tuple(widths)
    for _, _, up in adapters(part):
        yield up, "weight", 0, tuple(widths)
        yield up, "bias", 0, tuple(widths)


def cuts_of_rows(part: nn.Module) -> Iterator[Cut]:
    """Yield the cuts of a linear map whose input features are split, and of the LoRA adapters on it."""
    dim = feature_dims(part)[0]
    inner = (int(core(part).weight.shape[dim]),)
    yield core(part), "weight", dim, inner
    for _, down, _ in adapters(part):
        yield down, "weight", 1, inner
