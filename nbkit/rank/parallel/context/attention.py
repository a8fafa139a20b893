"""Attention in a block that works on a part of the positions: this rank's queries attend to the keys of all ranks.

Keys of the block's own positions are gathered with autograd. Causal masks and given masks are reduced to the rank's
queries. Other keys (the output of an encoder) are whole on every rank, and are not gathered.

A run of consecutive causal queries uses the keys up to its last position: q queries up to position p cost q x p pairs.
No kernel gets a mask for it. On a GPU, torch's `causal_lower_right` is used. On the CPU, two calls are made, for the
keys before the run and for its own keys, and their outputs are combined (`_CausalRun`). A rank with a chunk from the
head of the positions and one from the tail (`head_and_tail`) makes a call for each chunk, so that all ranks compute
equally many pairs. With dropout, whose scores are in memory, one call handles all queries.

A module in a block that mixes positions in another way, such as attention written by hand, is run on all positions by
every rank (`on_all`). Its inputs are gathered, and each rank keeps its positions of the output. So keys, scores and
masks are those of one process, and every rank computes all of them. Gradients of its parameters are sums over the
ranks, as everywhere in a block. With n ranks and hidden states of X bytes, a rank sends (n-1)/n X in forward and in
backward.
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
from nbkit.rank.torch_private import cpu_attention, cpu_attention_backward, tree_leaves, tree_map_only
from nbkit.tensor_layout import Runs, count


class ContextAttentionMode(TorchFunctionMode):
    """Mode in which calls of attention see all positions.

    calls: number of calls so far. runs: this rank's positions, out of `total`. own: number of these positions. across:
    numbers of the calls with whole keys; None finds them by their length, and adds them to `noted`. refuse: (what,
    numbers) -> the error to raise. paused: True while code works on all positions.
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
        # Dropout makes one draw for all queries.
        for runs in [self.runs] if dropout_p else [(run,) for run in self.runs]:
            given = query.narrow(-2, at, count(runs))
            outputs.append(self._causal(given, key, value, runs, dropout_p, scale=scale, enable_gqa=enable_gqa))
            at += count(runs)
        if len(outputs) == 1:
            return outputs[0]
        if query.ndim < 4:
            return torch.cat(outputs, -2)
        # Use the memory format of the kernels, so that heads are concatenated without a copy.
        return torch.cat([output.transpose(-3, -2) for output in outputs], -3).transpose(-3, -2)

    def _attend_all_heads(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run nn.MultiheadAttention on (T, B, D). The checks of torch require all keys in the arguments."""
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
        """Return the rows of a mask (..., T or 1, `keys` or 1) for this rank's queries."""
        if mask is None:
            return None
        rows, columns = mask.shape[-2:]
        if columns not in (1, keys) or rows not in (1, self.total, self.own):
            raise self.refuse("masks other keys than there are.", f"{rows} x {columns}")
        return taken(mask, -2, self.runs) if rows == self.total else mask

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, dropout_p: float, **named: Any) -> Tensor:
        """Attend causally from queries at the positions `runs` to the keys up to the last of these positions."""
        stop = runs[-1][1]
        key, value = key[..., :stop, :], value[..., :stop, :]
        if runs == ((0, stop),):
            return F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, **named)
        if (
            len(runs) == 1
            and not dropout_p
            and (found := _without_mask(query, key, value, runs[0][0], **named)) is not None
        ):
            return found
        mask = self.peers.masks.of(runs, query)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **named)


def _without_mask(
    query: Tensor, key: Tensor, value: Tensor, start: int, *, scale: float | None = None, enable_gqa: bool = False
) -> Tensor | None:
    """Attend causally from the queries beginning at `start` to all keys, or return None if that needs a mask."""
    if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return None
    if query.device.type != "cpu":
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

        bias = causal_lower_right(query.shape[-2], key.shape[-2])
        attended: Tensor = F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=enable_gqa)
        return attended
    if not (cpu_attention and cpu_attention_backward):
        return None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    joined: Tensor = _CausalRun.apply(query, key, value, start, scale)  # type: ignore[no-untyped-call]
    return joined


class _CausalRun(torch.autograd.Function):
    """Attention of queries that begin at `start`, in two calls of the CPU kernel: keys before `start`, and the others.

    Each call returns the log-sum-exp of its scores. The backward pass of each call uses the log-sum-exp of both calls,
    so it returns the correct gradients of its keys (Liu et al. 2023, ring attention).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None) -> Tensor:
        parts = [
            cpu_attention(query, key[..., at, :], value[..., at, :], 0.0, causal, scale=scale)
            for at, causal in _calls(start)
        ]
        sums = torch.logaddexp(parts[0][1], parts[1][1])
        shares = [(part[1] - sums).exp().unsqueeze(-1).to(query.dtype) for part in parts]
        output: Tensor = parts[0][0] * shares[0] + parts[1][0] * shares[1]
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.start, ctx.scale = start, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        query, key, value, output, sums = ctx.saved_tensors
        first, second = (
            cpu_attention_backward(
                grad, query, key[..., at, :], value[..., at, :], output, sums, 0.0, causal, scale=ctx.scale
            )
            for at, causal in _calls(ctx.start)
        )
        queries, (of_keys, of_values) = first[0].add_(second[0]), ([first[i], second[i]] for i in (1, 2))
        del first, second
        keys = torch.cat(of_keys, -2)
        of_keys.clear()  # so that not all gradients exist twice
        return queries, keys, torch.cat(of_values, -2), None, None


def _calls(start: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """Return (keys, is_causal) of the two calls."""
    return (slice(None, start), False), (slice(start, None), True)


MASKS = ("mask", "bias", "padding")
"""Words in the names of arguments that are masks, and are not split by position."""


@dataclass(frozen=True)
class BlockPart:
    """The part of the positions on which a block works.

    attention: mode of the block. given: id of a split argument of the block -> the argument before it was split.
    """

    attention: ContextAttentionMode
    given: Mapping[int, Tensor]

    def whole(self, name: str, x: Tensor) -> Tensor:
        """Return the argument `x` of a module in the block with all positions."""
        if id(x) in self.given:
            return self.given[id(x)]
        if x.ndim < 3 or x.shape[1] != self.attention.own or any(word in name.lower() for word in MASKS):
            return x
        return self.attention.peers.gather(x, 1, self.attention.total)

    def own(self, first: Tensor | None, x: Tensor) -> Tensor:
        """Return this rank's positions of an output `x` of the module. first: the first output tensor."""
        if x.ndim < 3 or x.shape[1] != self.attention.total or (x.ndim > 3 and x is not first):
            return x
        return taken(x, 1, self.attention.runs).contiguous()


_part: ContextVar[BlockPart | None] = ContextVar("part", default=None)


@contextmanager
def working_on(part: BlockPart) -> Iterator[None]:
    """Tell modules wrapped by `on_all`, inside this context, on which part their block works."""
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


def on_all(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of a module so that it gets all positions while its block works on a part."""
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
    """Return the names of positional arguments in order, even if another strategy has wrapped `forward` in *args."""
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
    """Return the fraction of the block's matrix elements in modules that work on a part of the positions."""
    sizes = {name: p.numel() for name, p in block.named_parameters() if p.ndim > 1}
    inside = sum(size for name, size in sizes.items() if any(name.startswith(f"{path}.") for path in whole))
    return 1 - inside / max(sum(sizes.values()), 1)
