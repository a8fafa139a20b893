"""Attention within a block that works on a part of the positions: of this rank's queries to the keys of all ranks.

Keys of the block's own positions are gathered with autograd; causal masks and given ones are cut to the rank's
queries. Keys of something else (what an encoder gave) are whole on every rank, and stay where they are.

Causal queries that follow each other look at the keys up to the last of them: q of them at as many pairs as q times
that. A rank with a chunk from the head of the positions and one from their tail (`head_and_tail`) attends once for
each, so that all ranks look at equally many pairs. Under dropout, whose scores are in memory, there is one call on all.

Modules within a block that every rank runs on all positions, its others on a part: attention written by hand.

What goes in is gathered, of what comes out each rank keeps its positions. So keys, scores and their masks are those of
one process, and every rank computes all of them; the gradients of what is learned there are sums over the ranks, as
everywhere in a block. On the wire over n ranks, for X bytes of hidden states: (n-1)/n X in forward and in backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.rank.rng.draw_plan import gathered
from nbkit.rank.torch_private import tree_leaves, tree_map_only
from nbkit.tensor_layout import Runs, count


class ContextAttentionMode(TorchFunctionMode):
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
        """Return a mask (..., T or 1, `keys` or 1), of this rank's queries."""
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


MASKS = ("mask", "bias", "padding")
"""What is in the names of arguments that hold no positions to be parted, but who may attend to whom."""


@dataclass(frozen=True)
class BlockPart:
    """What a block works on. attention: of it. given: id -> what an argument of the block was before it was parted."""

    attention: ContextAttentionMode
    given: Mapping[int, Tensor]

    def whole(self, name: str, x: Tensor) -> Tensor:
        """Return an argument of a module in the block, of all positions."""
        if id(x) in self.given:
            return self.given[id(x)]
        if x.ndim < 3 or x.shape[1] != self.attention.own or any(word in name.lower() for word in MASKS):
            return x
        return self.attention.peers.gather(x, 1, self.attention.total)

    def own(self, first: Tensor | None, x: Tensor) -> Tensor:
        """Of what the module gave, the positions of this rank. first: the first tensor of it."""
        if x.ndim < 3 or x.shape[1] != self.attention.total or (x.ndim > 3 and x is not first):
            return x
        return taken(x, 1, self.attention.runs).contiguous()


_part: ContextVar[BlockPart | None] = ContextVar("part", default=None)


@contextmanager
def working_on(part: BlockPart) -> Iterator[None]:
    """Inside, modules that are `on_all` know what the block around them works on."""
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


def on_all(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module, which sees all positions also where the block around it works on a part."""
    names = argument_names(forward)

    @wraps(forward)
    def seeing_all(*args: Any, **kwargs: Any) -> Any:
        if (part := _part.get()) is None:
            return forward(*args, **kwargs)
        labels = [*names[: len(args)], *[""] * (len(args) - len(names))]
        given = tuple(
            tree_map_only(Tensor, partial(part.whole, label), x) for label, x in zip(labels, args, strict=True)
        )
        named = {key: tree_map_only(Tensor, partial(part.whole, key), x) for key, x in kwargs.items()}
        token, part.attention.paused = _part.set(None), True
        try:
            with gathered("sequence"):
                output = forward(*given, **named)
        finally:
            _part.reset(token)
            part.attention.paused = False
        first = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        return tree_map_only(Tensor, partial(part.own, first), output)

    return seeing_all


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """Of positional arguments, in order: also where another strategy has put a forward of any arguments before it."""
    bound: Any = forward
    while not hasattr(bound, "__self__") and hasattr(bound, "__wrapped__"):
        bound = bound.__wrapped__
    module = getattr(bound, "__self__", None)
    for each in (forward, *(vars(kind).get("forward") for kind in type(module).__mro__)):
        found = inspect.signature(each).parameters if each is not None else {}
        if found and not any(p.kind == p.VAR_POSITIONAL for p in found.values()):
            return [name for name in found if name != "self"]
    return []


def share_outside(block: nn.Module, whole: frozenset[str]) -> float:
    """Of the elements of the block's matrices, the share in modules that work on a part of the positions."""
    sizes = {name: p.numel() for name, p in block.named_parameters() if p.ndim > 1}
    inside = sum(size for name, size in sizes.items() if any(name.startswith(f"{path}.") for path in whole))
    return 1 - inside / max(sum(sizes.values()), 1)
