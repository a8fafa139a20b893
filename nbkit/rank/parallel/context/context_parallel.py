"""Context parallelism: from the first block to the last every rank of the cp axis holds a part of the positions.

Keys and values are gathered with autograd (as in Llama 3, Grattafiori et al. 2024, section 3.3.2), queries stay where
they are; causal masks and given ones are cut to the rank's queries. Embedding and head work on all positions on every
rank. On the wire over n ranks, in bytes sent per rank, with K the bytes of a block's keys and values and X those of a
hidden state: per block (n-1)/n K in forward and in backward; (n-1)/n X once at each end, at the first block in
backward, at the last in forward. nn.MultiheadAttention gathers its input instead, (n-1)/n X, and computes all keys on
every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbkit.errors import StrategyError
from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.parallel.context.refusals import check_attention, check_mixing
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.tensor.sharded_tensor import whole
from nbkit.rank.rng.shard_offsets import extent
from nbkit.tensor_layout import bounds

# Positions of the sequence in this pass: the first block sets it, on later pipeline stages the model's input.
_positions: ContextVar[int | None] = ContextVar("positions", default=None)

_MASKS = ("mask", "bias", "padding")


@dataclass(frozen=True)
class Positionwise:
    """Plain data, the same on every rank that gets it.

    refused: why context parallelism would not train as one process does. between: names of parameters outside of the
    blocks that work on a part of the positions. in_parts: block -> its arguments that are computed from a part.
    """

    refused: StrategyError | None = None
    between: frozenset[str] = frozenset()
    in_parts: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ContextSplit:
    """partial: parameters whose gradients must be summed over cp after backward. notes: what the user should know."""

    partial: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def context_parallel(
    module: nn.Module,
    axes: Axes,
    blocks: Sequence[str],
    *,
    held: Collection[str] | None = None,
    tried: Positionwise | None = None,
) -> ContextSplit:
    """Spread the positions of the chain `blocks` over the cp axis. In place: the blocks' `forward` is replaced.

    blocks: names of the whole chain in order; each takes hidden states (B, T, ...) first and gives such. held: those
    that this rank has (default: all). tried: what running the model on parts has shown (see positionwise). Comes after
    tensor parallel surgery and before recomputation.
    Raises StrategyError for blocks that mix positions by other means than scaled_dot_product_attention; what only
    running shows, and nobody has tried, it raises in the first forward pass.
    """
    group = axes.group("cp")
    if group is None:
        return ContextSplit()
    if not blocks:
        raise StrategyError(
            "Context parallelism needs the model's chain of blocks, and none is known.",
            numbers=f"cp={axes.size('cp')}",
            hint="stages=[...] names them; or a strategy without cp",
        )
    check_attention(module)
    own = [name for name in blocks if held is None or name in held]
    for name in own:
        check_mixing(name, module.get_submodule(name))
        wrapper = Spread(
            name,
            Peers(group),
            first=name == blocks[0],
            last=name == blocks[-1],
            strict=axes.size("tp") == 1,
            attends=tried is None,
            in_parts=tried.in_parts.get(name, frozenset()) if tried is not None else frozenset(),
        )
        block = module.get_submodule(name)
        block.forward = wrapper.around(block.forward)  # type: ignore[method-assign]
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            # Ragged tensors in evaluation have no dim of positions.
            part.use_nested_tensor = False
    module.register_forward_pre_hook(_note_positions, with_kwargs=True)
    between = tried.between if tried is not None else frozenset()
    return ContextSplit(
        _partial(module, own, between), (f"positions in {axes.size('cp')} parts; embedding and head see all",)
    )


def _note_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The length of the first input that has a dim 1: right on a stage whose blocks receive hidden states."""
    long = (x.shape[1] for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim > 1)
    _positions.set(next(long, None))


def _partial(module: nn.Module, blocks: Sequence[str], between: Collection[str]) -> frozenset[str]:
    inside = {id(part) for name in blocks for part in module.get_submodule(name).modules()}
    partial = set()
    for name, places in homes(module).items():
        within = [id(part) in inside for part, _ in places]
        if any(within) and not all(within):
            raise StrategyError(
                f"The parameter {name!r} is used within the blocks and outside of them.",
                numbers="within, a rank's gradient is of its positions; outside, of all positions",
                hint="a strategy without cp",
            )
        if any(within) or name in between:
            partial.add(name)
    return frozenset(partial)


@dataclass(frozen=True)
class Spread:
    """What a block does to work on a part of the positions. first, last: whether it is at that end of the chain.

    strict: refuse hidden states that are not the rank's part. attends: refuse a block without attention. in_parts:
    arguments beside the hidden states that were computed from a part of them.
    """

    name: str
    peers: Peers
    first: bool
    last: bool
    strict: bool
    attends: bool = True
    in_parts: frozenset[str] = frozenset()

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        @wraps(forward)
        def spread(*args: Any, **kwargs: Any) -> Any:
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            hidden = self._hidden(next(iter(named.values()), None))
            total = self._total(hidden)
            if total < 2 * self.peers.size() and not torch.is_grad_enabled():
                # The first tokens of a generation: every rank computes them all.
                return forward(*args, **kwargs)
            start, stop = bounds(total, self.peers.size(), self.peers.rank())
            if self.strict and not self.first and hidden.shape[1] != stop - start:
                raise self._refusal("receives another number of positions than its part.", f"{hidden.shape[1]}", total)
            labels = [*names[: len(args)], *[""] * (len(args) - len(names))]
            placed = [
                self._placed(i == 0, label, x, hidden, total)
                for i, (label, x) in enumerate(zip(labels, args, strict=True))
            ]
            of_kwargs = {
                key: self._placed(not args and key == next(iter(kwargs)), key, x, hidden, total)
                for key, x in kwargs.items()
            }
            attention = _Attention(self, total, start, stop)
            with extent("sequence", start, total), attention:
                output = forward(*placed, **of_kwargs)
            if self.attends and not attention.calls:
                hint = "attention by F.scaled_dot_product_attention"
                raise self._refusal("calls no attention that context parallelism knows.", "0 calls", total, hint)
            return tree_map_only(Tensor, partial(self._joined, stop - start, total), output) if self.last else output

        return spread

    def _hidden(self, value: Any) -> Tensor:
        """The first tensor of the first argument: hidden states (B, T, ...)."""
        found = next((x for x in tree_leaves(value) if isinstance(x, Tensor)), None)
        if found is None or found.ndim < 3:
            raise self._refusal("takes no hidden states of (samples, positions, width) first.", "", None)
        return found

    def _total(self, hidden: Tensor) -> int:
        if self.first:
            _positions.set(hidden.shape[1])
        if (total := _positions.get()) is None:
            raise self._refusal("cannot tell the number of positions from the model's input.", "", None)
        if total < 2 * self.peers.size() and torch.is_grad_enabled():
            raise self._refusal(
                "needs two positions per rank at least.", "", total, "longer sequences, or a smaller cp"
            )
        return total

    def _placed(self, carried: bool, name: str, value: Any, hidden: Tensor, total: int) -> Any:
        """An argument as the block on a part of the positions takes it."""
        if carried:
            return tree_map_only(Tensor, lambda x: self.peers.split(whole(x), 1), value) if self.first else value
        if name in self.in_parts:
            return value
        return tree_map_only(Tensor, lambda x: self._beside(name.lower(), whole(x), hidden, total), value)

    def _beside(self, name: str, x: Tensor, hidden: Tensor, total: int) -> Tensor:
        dim = dim_of_positions(name, x, hidden, total)
        if dim is not None:
            return self.peers.split(x, dim)
        return self.peers.copy(x) if x.requires_grad else x

    def _joined(self, part: int, total: int, x: Tensor) -> Tensor:
        return self.peers.join(whole(x), 1, total) if x.ndim > 2 and x.shape[1] == part else x

    def _refusal(
        self, what: str, numbers: str, total: int | None, hint: str = "a strategy without cp"
    ) -> StrategyError:
        counted = f"{total} positions over {self.peers}" if total is not None else str(self.peers)
        parts = (part for part in (counted, numbers) if part)
        return StrategyError(f"The block {self.name!r} {what}", numbers=", ".join(parts), hint=hint)


def dim_of_positions(name: str, x: Tensor, hidden: Tensor, total: int) -> int | None:
    """Along which dim an argument holds the positions: rotary tables, position ids, gates. Masks are cut later."""
    shape = x.shape
    if any(word in name for word in _MASKS):
        return None
    if x.ndim >= 3:
        return next((dim for dim in range(1, x.ndim - 1) if shape[dim] == total), None)
    if x.ndim == 2 and not x.is_floating_point() and not x.is_complex():
        return 1 if shape[1] == total else None
    # Tables without a dim of samples; a vector per sample is none, even where there are as many samples as positions.
    per_sample = shape[:1] == hidden.shape[:1] and (x.requires_grad or "position" not in name)
    return 0 if x.ndim and shape[0] == total and not per_sample else None


class _Attention(TorchFunctionMode):
    """Within a block: attention of this rank's queries to the keys of all ranks."""

    def __init__(self, spread: Spread, total: int, start: int, stop: int) -> None:
        super().__init__()
        self.spread, self.total, self.start, self.stop, self.calls = spread, total, start, stop, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.calls += 1
            return self._attend_all_heads(*args, **kwargs)
        return func(*args, **kwargs)

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
        own = self.stop - self.start
        if (query.shape[-2], key.shape[-2]) != (own, own):
            found = f"{query.shape[-2]} queries, {key.shape[-2]} keys on a rank with {own}"
            raise self.spread._refusal("attends to something else than its own positions.", found, self.total)
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
        elif attn_mask is not None:
            attn_mask = self._rows(attn_mask)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _attend_all_heads(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention: (T, B, D), and torch's own checks want all keys in the arguments."""
        if query is not key or key is not value:
            raise self.spread._refusal("attends to something else than its own positions.", "", self.total)
        if kwargs.get("attn_mask") is not None:
            kwargs |= {"attn_mask": self._rows(kwargs["attn_mask"]), "is_causal": False}
        whole = self._all(query, 0)
        return F.multi_head_attention_forward(query, whole, whole, *args, **kwargs)

    def _all(self, x: Tensor, dim: int) -> Tensor:
        return self.spread.peers.gather(x, dim, self.total)

    def _rows(self, mask: Tensor) -> Tensor:
        """A mask (..., T or 1, S or 1), of this rank's queries."""
        rows, keys = mask.shape[-2:]
        if keys not in (1, self.total) or rows not in (1, self.total, self.stop - self.start):
            raise self.spread._refusal("masks other keys than there are.", f"{rows} x {keys}", self.total)
        return mask[..., self.start : self.stop, :] if rows == self.total else mask
