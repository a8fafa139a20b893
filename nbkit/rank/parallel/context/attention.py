"""Attention in a block that works on a part of the positions: this rank's queries attend to the keys of all ranks.

Keys and values of the block's own positions are gathered. Causal masks and given masks are reduced to the rank's
queries. Other keys (the output of an encoder) are whole on every rank, and are not gathered.

Gathered keys and values are freed after attention. For backward, a rank keeps only its own part, and gathers the others
again. A kernel that copies keys saves its copy of all of them: torch's attention without a fused kernel, and on a GPU
head sizes that are no multiple of 8. Gathering and attention are one node of autograd (`_AttentionToAll`). So every
rank sends the same things in the same order in backward, whatever else its graph contains.

A run of consecutive causal queries uses the keys up to its last position: q queries up to position p cost q x p pairs.
No kernel gets a mask for it. On a GPU, torch's `causal_lower_right` is used. On the CPU, two calls are made, for the
keys before the run and for its own keys, and their outputs are combined (`_CausalRun`). A rank with a chunk from the
head of the positions and one from the tail (`head_and_tail`) makes a call for each chunk, so that all ranks compute
equally many pairs. With dropout, whose scores are in memory, one call handles all queries.

nn.MultiheadAttention projects this rank's positions, and then attends in the same way. If it returns its weights or
appends keys of its own (`add_bias_kv`, `add_zero_attn`), its input is gathered instead. Then each rank projects all
keys, and keeps them for backward.

A module in a block that mixes positions in another way, such as attention written by hand, is run on all positions by
every rank (`on_all`). Its inputs are gathered, and each rank keeps its positions of the output. So keys, scores and
masks are those of one process, and every rank computes all of them and keeps them for backward. Gradients of its
parameters are sums over the ranks, as everywhere in a block. With n ranks and hidden states of X bytes, a rank sends
(n-1)/n X in forward and in backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.parallel.tensor.attention import merged_mask
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.rank.rng.draw_plan import gathered
from nbkit.rank.rng.random_ops import rebound
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
            raise self.refuse("uses keys that do not belong to its own positions.", found)
        if across:
            attn_mask = self._rows(attn_mask, key.shape[-2])
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
            )
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (_autocast(x) for x in (query, key, value))  # before a rank sends them
        # Dropout makes one draw for all queries.
        parts = [(run,) for run in self.runs] if is_causal and not dropout_p else [self.runs]
        if is_causal:
            masks = [self._causal_mask(query, value, runs, dropout_p) for runs in parts]
        else:
            masks = [self._rows(attn_mask, self.total)]
        # Only kernels of a GPU without a mask repeat heads themselves.
        by_kernel = enable_gqa and query.device.type != "cpu" and all(mask is None for mask in masks)
        exchange = _KeyExchange(self.peers, self.total, query.shape[-3] if enable_gqa and not by_kernel else None)
        named: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": by_kernel}
        calls, at = [], 0
        for runs in parts:
            stop = runs[-1][1] if is_causal else self.total
            attend = partial(_causal, runs, named) if is_causal else partial(F.scaled_dot_product_attention, **named)
            calls.append(_Call(slice(at, at + count(runs)), slice(stop), attend))
            at += count(runs)
        return _attention(exchange, calls, query, key, value, masks)

    def _attend_all_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        in_weight: Tensor,
        in_bias: Tensor,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run nn.MultiheadAttention on (T, B, D)."""
        across = query is not key and key is value and self._is_across(key.shape[0])
        if not across and (query is not key or key is not value):
            raise self.refuse("uses keys that do not belong to its own positions.", "")
        given = width, heads, in_weight, in_bias, bias_k, bias_v, add_zero_attn, *args
        mask, padding = kwargs.get("attn_mask"), kwargs.get("key_padding_mask")
        weighs = kwargs.get("need_weights", True)
        if across or weighs or bias_k is not None or add_zero_attn or query.ndim != 3:
            # The checks of torch require all keys in the arguments.
            key = key if across else self.peers.gather(query, 0, self.total)
            if mask is not None:
                kwargs |= {"attn_mask": self._rows(mask, len(key)), "is_causal": False}
            return F.multi_head_attention_forward(query, key, key, *given, **kwargs)
        causal = kwargs.get("is_causal", False) and padding is None
        if causal:
            mask = None
        else:
            mask = merged_mask(self._rows(mask, self.total), padding, query.shape[1], heads, query.dtype)

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, *_: Any
        ) -> Tensor:
            return self._attend(query, key, value, mask, dropout_p, causal)

        # torch would refuse masks of all keys, because it sees only this rank's.
        kwargs |= {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
        plain: Any = F.multi_head_attention_forward
        return rebound(plain, scaled_dot_product_attention=attention)(query, query, query, *given, **kwargs)

    def _rows(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """Return the rows of a mask (..., T or 1, `keys` or 1) for this rank's queries."""
        if mask is None:
            return None
        rows, columns = mask.shape[-2:]
        if columns not in (1, keys) or rows not in (1, self.total, self.own):
            what = "has an attention mask of another size than its keys."
            if columns == self.own != keys:
                what = "makes a mask for the positions of one rank: make it outside of the blocks, for all positions."
            raise self.refuse(what, f"{rows} x {columns}")
        return taken(mask, -2, self.runs) if rows == self.total else mask

    def _causal_mask(self, query: Tensor, value: Tensor, runs: Runs, dropout_p: float) -> Tensor | None:
        """Return the mask with which queries at the positions `runs` attend causally, or None if they need none."""
        kernel = query.device.type != "cpu" or (cpu_attention and cpu_attention_backward)
        one_run = len(runs) == 1 and not dropout_p and query.ndim == 4 and query.shape[-1] == value.shape[-1] and kernel
        return None if runs[0] == (0, runs[-1][1]) or one_run else self.peers.masks.of(runs, query)


def _autocast(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which attention computes under autocast."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


@dataclass(frozen=True)
class _Call:
    """A call of attention: (queries, keys, values, mask) -> outputs. queries, keys: their places along positions."""

    queries: slice
    keys: slice
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

    def given(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of this rank's queries, and of all keys and values, that the call gets."""
        return query[..., self.queries, :], key[..., self.keys, :], value[..., self.keys, :]


def _causal(
    runs: Runs, named: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Attend causally from queries at the positions `runs` to the keys up to the last of these positions."""
    if mask is None and runs[0][0]:
        return _without_mask(query, key, value, runs[0][0], named["scale"], named["enable_gqa"])
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, **named)


def _joined(outputs: list[Tensor], query: Tensor) -> Tensor:
    """Return the outputs of all queries of this rank."""
    if len(outputs) == 1:
        return outputs[0]
    if torch.is_grad_enabled() or query.shape[-1] != outputs[0].shape[-1]:
        return torch.cat(outputs, -2)
    # Use the memory format of the queries, as kernels do, so that heads are concatenated without a copy.
    return torch.cat(outputs, -2, out=torch.empty_like(query))


def _without_mask(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Attend causally from the queries beginning at `start` to all keys."""
    if query.device.type == "cpu":
        return _CausalRun.apply(query, key, value, start, scale)  # type: ignore[no-any-return, no-untyped-call]
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

    bias = causal_lower_right(query.shape[-2], key.shape[-2])
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=enable_gqa)


@dataclass(frozen=True)
class _KeyExchange:
    """Gathers keys and values (..., H, T, E), and sums their gradients over the ranks.

    total: number of all positions. heads: repeat the heads of keys and values until there are so many; None: do not.
    """

    peers: Peers
    total: int
    heads: int | None

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all positions."""
        if _alike(key, value):
            both = self.peers.gather(torch.cat([key, value], -1), -2, self.total)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        else:
            key, value = (self.peers.gather(x, -2, self.total) for x in (key, value))
        if self.heads is None:
            return key, value
        key, value = (x.repeat_interleave(self.heads // x.shape[-3], -3) for x in (key, value))
        return key, value

    def reduce(self, own: Sequence[Tensor], grads: list[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of `own`, this rank's key and value.

        grads: the gradients of what `gather` has returned, on each rank. The list is emptied, to free them early.
        """
        if self.heads is not None:
            grads[:] = [grad.unflatten(-3, (x.shape[-3], -1)).sum(-3) for x, grad in zip(own, grads, strict=True)]
        if not _alike(*own):
            return [self.peers.reduce(grads.pop(0), -2) for _ in own]
        both = torch.cat(grads, -1)
        grads.clear()
        both = self.peers.reduce(both, -2)
        return tuple(both.split([x.shape[-1] for x in own], -1))


def _alike(key: Tensor, value: Tensor) -> bool:
    return key.shape[:-1] == value.shape[:-1] and key.dtype == value.dtype


def _attention(
    exchange: _KeyExchange,
    calls: Sequence[_Call],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor | None],
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks. Keep only its own `key` and `value` for backward."""
    learned = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, *masks))
    if learned and not exchange.peers.in_one_graph:
        return _AttentionToAll.apply(exchange, calls, query, key, value, *masks)  # type: ignore[no-any-return, no-untyped-call]
    whole = exchange.gather(key, value)
    given = (call.given(query, *whole) for call in calls)
    outputs = [call.attend(*own, mask) for call, own, mask in zip(calls, given, masks, strict=True)]
    return _joined(outputs, query)


class _AttentionToAll(torch.autograd.Function):
    """Gathers keys and values and attends to them. Backward gathers them again, and sums their gradients.

    Forward records a graph of each call of attention, so that backward uses what the kernel has saved, and computes
    nothing twice. The graphs hold no tensors (see `_Saved`). Tensors are saved by this node, so that activation
    checkpointing and other hooks on saved tensors see them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: _KeyExchange,
        calls: Sequence[_Call],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *masks: Tensor | None,
    ) -> Tensor:
        whole = exchange.gather(key, value)
        saved, leaf = _Saved(whole), query.new_empty(0).requires_grad_()
        ctx.exchange, ctx.calls, ctx.saved, ctx.ends, ctx.inputs = exchange, calls, saved, [], []
        ctx.keys_learn = key.requires_grad or value.requires_grad
        outputs: list[Tensor] = []
        for call, mask in zip(calls, masks, strict=True):
            learns = query.requires_grad, *(ctx.keys_learn,) * 2, mask is not None and mask.requires_grad
            given: tuple[Any, ...] = *call.given(query, *whole), mask
            with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
                inputs = [
                    _Input.apply(x.detach(), leaf) if learn else x for x, learn in zip(given, learns, strict=True)
                ]
                output = call.attend(*inputs)
            outputs.append(output.detach())
            ctx.ends.append(get_gradient_edge(output))
            ctx.inputs.append(
                [get_gradient_edge(x) if learn else None for x, learn in zip(inputs, learns, strict=True)]
            )
        joined = _joined(outputs, query)
        same = [(x, x) for x in (query, *masks) if x is not None]
        alone = joined.detach()  # a view of `joined` would refer back to this node: a cycle that is never freed
        parts = [alone[..., call.queries, :] for call in calls]
        same += zip(outputs, parts, strict=True)
        ctx.save_for_backward(key, value, *saved.taken(same))
        return joined

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        key, value, *tensors = ctx.saved_tensors
        of_queries: list[Any] = []
        of_keys: list[Any] = [None, None]
        of_masks: list[Any] = []
        with ctx.saved.filled(ctx.exchange.gather(key, value), tensors):
            # The last call has the most keys. Begin with it, so that gradients of other calls are added to its.
            for call, end, inputs in reversed(list(zip(ctx.calls, ctx.ends, ctx.inputs, strict=True))):
                # A pipeline may call this twice. The graph holds no tensors, so keeping it costs nothing.
                edges = [edge for edge in inputs if edge is not None]
                found = list(torch.autograd.grad([end], edges, [grad[..., call.queries, :]], retain_graph=True))
                of_masks.insert(0, found.pop() if inputs[3] is not None else None)
                for i in (1, 0) if ctx.keys_learn else ():
                    of_keys[i] = _added(of_keys[i], found.pop(), ctx.exchange.total)
                of_queries = found + of_queries
        of_query = _joined(of_queries, grad) if of_queries else None
        own = ctx.exchange.reduce((key, value), of_keys) if ctx.keys_learn else of_keys
        return None, None, of_query, *own, *of_masks


def _added(total: Tensor | None, part: Tensor, length: int) -> Tensor:
    """Return `total` (..., length, E) plus `part`, which has the first positions. total: changed in place, or None."""
    if total is None:
        return F.pad(part, (0, 0, 0, length - part.shape[-2])) if part.shape[-2] < length else part
    total[..., : part.shape[-2], :].add_(part)
    return total


class _Input(torch.autograd.Function):
    """Passes a tensor on. The node marks where a gradient is asked for, and unlike a leaf it holds no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


class _Saved:
    """The tensors that graphs of attention save. The graphs themselves get only their numbers.

    whole: keys and values of all positions; empty between forward and backward. Views of them are not saved: the graphs
    get their geometry.
    """

    def __init__(self, whole: tuple[Tensor, Tensor]) -> None:
        self.whole: tuple[Tensor, ...] = whole
        self.tensors: list[Tensor] = []

    def pack(self, x: Tensor) -> Any:
        """Keep `x`, and return what the graph holds in its place."""
        for i, base in enumerate(self.whole):
            if _same_memory(x, base):
                return i, x.shape, x.stride(), x.storage_offset()
        self.tensors.append(x)
        return len(self.tensors) - 1

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor for which the graph holds `packed`."""
        if isinstance(packed, int):
            return self.tensors[packed]
        i, *geometry = packed
        view: Tensor = self.whole[i].as_strided(*geometry)
        return view

    def taken(self, same: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the tensors and forget them.

        same: pairs of tensors with equal values. A tensor with the memory of the first one is replaced by the second,
        for two reasons. First, the output of a kernel need not exist beside the joined output. Second, a tensor that
        autograd passes to a hook shares the memory, but does not count changes in place. The tensor that replaces it
        counts them, so backward raises an error after a change.
        """
        tensors, self.tensors, self.whole = self.tensors, [], ()
        return [next((_instead(x, *pair) for pair in same if _same_memory(x, pair[0])), x) for x in tensors]

    @contextmanager
    def filled(self, whole: tuple[Tensor, Tensor], tensors: list[Tensor]) -> Iterator[None]:
        """Give the graphs their tensors back inside this context."""
        self.whole, self.tensors = whole, tensors
        try:
            yield
        finally:
            self.whole, self.tensors = (), []


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _instead(x: Tensor, known: Tensor, other: Tensor) -> Tensor:
    """Return the tensor to save in place of `x`, which has the memory of `known`; `other` has its values."""
    if (x.shape, x.stride(), x.storage_offset()) == (known.shape, known.stride(), known.storage_offset()):
        return other
    return other.as_strided(x.shape, x.stride(), x.storage_offset()) if _same_memory(known, other) else x


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
