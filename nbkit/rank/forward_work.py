"""Counts the work of a forward pass: floating-point operations, and the bytes that other operations touch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from nbkit.rank.torch_private import cpu_attention, tree_leaves
from nbkit.rank.watching_mode import WatchingMode


class ForwardWork(WatchingMode):
    """A mode that counts the work of the operations inside it.

    flops: two for each multiplication in matrix products, convolutions and attention, by torch's own formulas. touched:
    the bytes that all other operations read and write. Views are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.touched = 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            with suppress(Exception):  # if torch's formula does not accept these arguments, count nothing
                self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is cpu_attention:
            self.flops += _attention(*args, **(kwargs or {}))
        elif func.namespace == "aten":
            given, made = _tensors((args, kwargs)), _tensors(out)
            storages = {one.untyped_storage()._cdata for one in given}
            if func._schema.is_mutable or not any(one.untyped_storage()._cdata in storages for one in made):
                self.touched += sum(one.nbytes for one in (*given, *made))
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> float:
    """Return the FLOPs of the scores and of the weighted sums of values; half of them for causal attention."""
    return 2.0 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]) / (2 if is_causal else 1)
