"""Attention within a block that works on a part of the positions: of this rank's queries to the keys of all ranks.

Keys of the block's own positions are gathered with autograd; causal masks and given ones are cut to the rank's
queries. Keys of something else (what an encoder gave) are whole on every rank, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.context.peers import Peers


class Attention(TorchFunctionMode):
    """While it is entered, calls of attention see all positions. calls: how many there were.

    start, stop: of this rank, of `total` positions. across: numbers of the calls whose keys are whole; None notes them
    by their length. refuse: (what, numbers) -> the error. paused: everything is on all positions already.
    """

    def __init__(
        self,
        peers: Peers,
        place: tuple[int, int, int],
        across: frozenset[int] | None,
        refuse: Callable[[str, str], Exception],
    ) -> None:
        super().__init__()
        self.peers, self.refuse, self.calls, self.paused = peers, refuse, 0, False
        self.start, self.stop, self.total = place
        self._across = across
        self.noted: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused and func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            self.calls += 1
            attend = self._attend if func is F.scaled_dot_product_attention else self._attend_all_heads
            return attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_across(self, keys: int) -> bool:
        number, own = self.calls - 1, self.stop - self.start
        if self._across is None and keys != own:
            self.noted.add(number)
        return number in (self.noted if self._across is None else self._across)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        own, across = self.stop - self.start, self._is_across(key.shape[-2])
        if query.shape[-2] != own or (key.shape[-2] != own and not across) or (across and is_causal):
            found = f"{query.shape[-2]} queries, {key.shape[-2]} keys on a rank with {own}"
            raise self.refuse("attends to something else than its own positions.", found)
        if across:
            attn_mask = self._rows(attn_mask, key.shape[-2])
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
            )
        if key.shape[:-1] == value.shape[:-1] and key.dtype == value.dtype:
            both = self._all(torch.cat([key, value], -1), -2)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        else:
            key, value = self._all(key, -2), self._all(value, -2)
        if is_causal and self.start:
            # No query of this rank sees beyond its last position.
            key, value, is_causal = key[..., : self.stop, :], value[..., : self.stop, :], False
            rows = torch.arange(self.start, self.stop, device=query.device)
            attn_mask = rows[:, None] >= torch.arange(self.stop, device=query.device)
        elif is_causal:
            key, value = key[..., : self.stop, :], value[..., : self.stop, :]
        else:
            attn_mask = self._rows(attn_mask, self.total)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _attend_all_heads(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention: (T, B, D), and torch's own checks want all keys in the arguments."""
        across = query is not key and key is value and self._is_across(key.shape[0])
        if not across and (query is not key or key is not value):
            raise self.refuse("attends to something else than its own positions.", "")
        keys = key.shape[0] if across else self.total
        if kwargs.get("attn_mask") is not None:
            kwargs |= {"attn_mask": self._rows(kwargs["attn_mask"], keys), "is_causal": False}
        key = key if across else self._all(query, 0)
        return F.multi_head_attention_forward(query, key, key, *args, **kwargs)

    def _all(self, x: Tensor, dim: int) -> Tensor:
        return self.peers.gather(x, dim, self.total)

    def _rows(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """A mask (..., T or 1, `keys` or 1), of this rank's queries."""
        if mask is None:
            return None
        rows, columns = mask.shape[-2:]
        if columns not in (1, keys) or rows not in (1, self.total, self.stop - self.start):
            raise self.refuse("masks other keys than there are.", f"{rows} x {columns}")
        return mask[..., self.start : self.stop, :] if rows == self.total else mask
