"""Attention within a block that works on a part of the positions: of this rank's queries to the keys of all ranks.

Keys of the block's own positions are gathered with autograd; causal masks and given ones are cut to the rank's
queries. Keys of something else (what an encoder gave) are whole on every rank, and stay where they are.

Causal queries that follow each other look at the keys up to the last of them: q of them at as many pairs as q times
that. A rank with a chunk from the head of the positions and one from their tail (`head_and_tail`) attends once for
each, so that all ranks look at equally many pairs. Under dropout, whose scores are in memory, there is one call on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.tensor_layout import Runs, count


class Attention(TorchFunctionMode):
    """While it is entered, calls of attention see all positions. calls: how many there were.

    runs: this rank's positions, of `total`; own: their number. across: numbers of the calls whose keys are whole; None
    notes them by their length. refuse: (what, numbers) -> the error. paused: everything is on all positions already.
    """

    def __init__(
        self,
        peers: Peers,
        total: int,
        across: frozenset[int] | None,
        refuse: Callable[[str, str], Exception],
    ) -> None:
        super().__init__()
        self.peers, self.refuse, self.calls, self.paused = peers, refuse, 0, False
        self.runs, self.total = peers.runs(total), total
        self.own = count(self.runs)
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
        number = self.calls - 1
        if self._across is None and keys != self.own:
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
        own, across = self.own, self._is_across(key.shape[-2])
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
        if not is_causal:
            attn_mask = self._rows(attn_mask, self.total)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
            )
        at, outputs = 0, []
        # What drops is one draw for all queries.
        for runs in [self.runs] if dropout_p else [(run,) for run in self.runs]:
            given = query.narrow(-2, at, count(runs))
            outputs.append(self._causal(given, key, value, runs, dropout_p, scale=scale, enable_gqa=enable_gqa))
            at += count(runs)
        if len(outputs) == 1:
            return outputs[0]
        if query.ndim < 4:
            return torch.cat(outputs, -2)
        # As the kernels leave it, so that heads are put beside each other without a copy.
        return torch.cat([output.transpose(-3, -2) for output in outputs], -3).transpose(-3, -2)

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
        if columns not in (1, keys) or rows not in (1, self.total, self.own):
            raise self.refuse("masks other keys than there are.", f"{rows} x {columns}")
        return taken(mask, -2, self.runs) if rows == self.total else mask

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, dropout_p: float, **named: Any) -> Tensor:
        """Queries at the positions `runs`, to the keys up to theirs: none of them sees beyond the last."""
        stop = runs[-1][1]
        key, value = key[..., :stop, :], value[..., :stop, :]
        if runs == ((0, stop),):
            return F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, **named)
        mask = self.peers.masks.of(runs, query)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **named)
