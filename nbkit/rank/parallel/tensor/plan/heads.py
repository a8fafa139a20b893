"""The number of heads of an attention, the attributes that say it, and their values for a part of the heads."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
    """Query heads, key-value heads, features of one head."""

    heads: int
    kv_heads: int
    dim: int


def heads_of(owner: nn.Module, *, q: int, k: int) -> Heads | None:
    """From the attention's own attributes or its config; None when nothing says.

    q, k: output features of its query and key projections.
    """
    counts = [value for _, name, value in _numbers(owner) if name in _HEADS and value > 0 and q % value == 0]
    dims = [value for _, name, value in _numbers(owner) if name in _HEAD_DIM and value > 0 and q % value == 0]
    dim = dims[0] if dims else q // counts[0] if counts else 0
    return Heads(q // dim, k // dim, dim) if dim and k % dim == 0 else None


def counts_heads(owner: nn.Module) -> bool:
    """Whether an attribute of its own says how many heads it has."""
    return any(not home and name in _HEADS for home, name, _ in _numbers(owner))


def named_counts(owner: nn.Module, heads: Heads) -> tuple[str, ...]:
    """Attributes of `owner`, and of its configs, whose names say that they count heads, or features of all heads."""
    parts = {**dict.fromkeys(_HEADS, heads.heads), **dict.fromkeys(_KV_HEADS, heads.kv_heads)}
    widths = {heads.heads * heads.dim, heads.kv_heads * heads.dim}
    return tuple(
        f"{home}.{name}" if home else name
        for home, name, value in _numbers(owner)
        if (name in parts and value in (heads.heads, heads.kv_heads))
        or (not home and name in _WIDTHS and value in widths)
    )


def numbers_in(owner: nn.Module, values: Collection[int], reads: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Attributes that are one of `values`, of the modules of `owner`, of those in `reads`, and of their configs.

    reads: path of a module within -> its own attributes that are read while it runs.
    """
    return tuple(
        (f"{path}:" if path else "") + (f"{home}.{name}" if home else name)
        for path, part in owner.named_modules()
        for home, name, value in _numbers(part)
        if value in values and (home or name) in reads.get(path, ())
    )


def of_configs(counts: Iterable[str]) -> set[str]:
    """Those of `counts` that stand in a config."""
    return {count for count in counts if "." in count.rpartition(":")[2]}


def divide(owner: nn.Module, counts: Iterable[str], size: int) -> None:
    """Let the attributes `counts` of `owner`, and of modules in it, be those of a part; of a config, it gets a copy."""
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
        # Frozen dataclasses too: the copy is ours.
        object.__setattr__(target, name, getattr(target, name) // size)


def _numbers(owner: nn.Module) -> Iterator[tuple[str, str, int]]:
    """(attribute that holds the config, "" for its own; name; value): whole numbers, its own first."""
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
