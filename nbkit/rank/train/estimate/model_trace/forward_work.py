"""Counts what a forward does: multiplications, and the bytes that everything else reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from nbkit.rank.torch_private import tree_leaves
from nbkit.rank.watching_mode import WatchingMode

_FLASH_ON_CPU = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class ForwardWork(WatchingMode):
    """Within it, `flops` is two for each multiplication of matrix products, convolutions and attention, by torch's own
    formulas, and `touched` the bytes that all other operations read and write. Views do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.touched = 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is _FLASH_ON_CPU:
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
    """Scores, and the sums of values that they weigh; masked, half of both."""
    return 2.0 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]) / (2 if is_causal else 1)
