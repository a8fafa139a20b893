"""The number of heads of an attention, the attributes that say it, and their values for a part of the heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
    return any(home is owner and name in _HEADS for home, name, _ in _numbers(owner))


def shrink(owner: nn.Module, heads: Heads, *, size: int, own_config: bool) -> list[str]:
    """Let `owner` say its part: counts of heads, and widths of what its projections give. Returns what was changed.

    own_config: whether counts in a config count too; the attention then gets a copy of it.
    """
    changed = []
    parts = {**dict.fromkeys(_HEADS, heads.heads), **dict.fromkeys(_KV_HEADS, heads.kv_heads)}
    widths = {heads.heads * heads.dim, heads.kv_heads * heads.dim}
    copied: dict[int, Any] = {}
    for home, name, value in _numbers(owner):
        if home is not owner and not own_config:
            continue
        counts = (name in parts and value in (heads.heads, heads.kv_heads)) or (
            home is owner and name in _WIDTHS and value in widths
        )
        if not counts:
            continue
        target = home
        if home is not owner:
            target = copied.setdefault(id(home), copy.copy(home))
        # Frozen dataclasses too: the copy is ours.
        object.__setattr__(target, name, value // size)
        changed.append(name)
    for key, value in list(vars(owner).items()):
        if id(value) in copied:
            vars(owner)[key] = copied[id(value)]
    return changed


def _numbers(owner: nn.Module) -> Iterator[tuple[Any, str, int]]:
    """(object, attribute, value): the attention's own whole numbers first, then those of its config."""
    configs = []
    for name, value in list(vars(owner).items()):
        if type(value) is int:
            yield owner, name, value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value):
            configs.append(value)
    for config in configs:
        for name, value in list(vars(config).items()):
            if type(value) is int:
                yield config, name, value
