"""Context parallelism: from the first block to the last, every rank of the cp axis holds a part of the positions.

Keys and values are gathered in forward, and again in backward (as in Llama 3, Grattafiori et al. 2024, section 3.3.2),
and queries stay local: see attention.py. If attention is causal, a part consists of a chunk from the head of the
positions and one from the tail (as in Llama 3), so that attention costs the same on every rank. Otherwise a part is
contiguous.

A module of a block that mixes positions in another way runs on all positions on every rank: see `on_all` in
attention.py. So do the embedding and the head. An encoder and a decoder, or two towers, are separate chains. Positions
are joined after the last block of each chain.

Bytes sent per rank, over n ranks, where K is the bytes of a block's keys and values and X the bytes of the hidden
states: per block (n-1)/n K in forward, and 2 (n-1)/n K in backward, for keys and values and for their gradients; and
(n-1)/n X once at each end of a chain: at the first block in backward, and at the last one in forward. A recomputed
forward sends as much as the first one. A tensor from another chain that all blocks use costs 2 (n-1)/n of its bytes per
block, in backward.

A model is refused if its attention is unknown, or if layers mix positions (`check_attention`, `check_mixing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.context.attention import (
    MASKS,
    BlockPart,
    ContextAttentionMode,
    argument_names,
    on_all,
    working_on,
)
from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.tensor.sharded_tensor import whole
from nbkit.rank.rng.draw_plan import extent
from nbkit.rank.torch_private import ConvNd, NormBase, tree_leaves, tree_map_only
from nbkit.tensor_layout import contiguous, head_and_tail

_MIXERS = (ConvNd, nn.RNNBase, NormBase)


def check_attention(module: nn.Module, *, tried: bool) -> None:
    """Raise StrategyError for a transformers model that does not use scaled_dot_product_attention.

    tried: True if the model is also run on parts. Then refuse only a model that could use this function.
    """
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    could = getattr(module, "_supports_sdpa", True)
    if kind not in (None, "sdpa") and (could or not tried):
        raise StrategyError(
            "Context parallelism gathers keys in scaled_dot_product_attention, and this model uses another function.",
            numbers=f"attn_implementation={kind!r}",
            hint="attn_implementation='sdpa'"
            if could
            else f"a strategy without cp: {type(module).__name__} has no other",
        )


def check_mixing(name: str, block: nn.Module) -> None:
    """Raise StrategyError for a block with convolutions, recurrent layers, BatchNorm, or batch_first=False.

    name: path of the block. Convolutions of kernel size 1 are allowed.
    """
    for path, part in block.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
            raise StrategyError(
                f"{where!r} takes (positions, samples, width); context parallelism splits (samples, positions, width).",
                numbers="batch_first=False",
                hint="batch_first=True",
            )
        one_by_one = isinstance(part, ConvNd) and all(size == 1 for size in part.kernel_size)
        if isinstance(part, _MIXERS) and not one_by_one:
            raise StrategyError(
                f"{where!r} mixes positions, so a rank with a part of the positions cannot compute it.",
                numbers=f"{type(part).__name__} in a block",
                hint="a strategy without cp",
            )


# Number of positions in this pass. Set by the first block, and on later pipeline stages by the model's input.
_positions: ContextVar[int | None] = ContextVar("positions", default=None)

_together: ContextVar[bool] = ContextVar("together", default=False)


@contextmanager
def together() -> Iterator[None]:
    """Make every rank compute all positions inside this context, if gradients are off."""
    before = _together.set(True)
    try:
        yield
    finally:
        _together.reset(before)


@dataclass(frozen=True)
class PositionMethod:
    """The method by which a block works on a part of the positions.

    in_parts: arguments computed from a part of the positions, which are passed unchanged. uncut: arguments that stay
    whole, whatever their shape. across: numbers of the attention calls with whole keys (None: decide by length). whole:
    paths, inside the block, of modules that run on all positions.
    """

    in_parts: frozenset[str] = frozenset()
    uncut: frozenset[str] = frozenset()
    across: frozenset[int] | None = frozenset()
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Positionwise:
    """Result of a run on parts of the positions. Plain data, the same on every rank.

    refused: why context parallelism would not train as one process does, or None. between: names of parameters outside
    of the blocks that work on a part of the positions. ways: block -> how it works on a part. begins: first blocks of
    all chains but the first. balanced: True if parts are `head_and_tail`, None if attention is not causal.
    """

    refused: StrategyError | None = None
    between: frozenset[str] = frozenset()
    ways: Mapping[str, PositionMethod] = field(default_factory=dict)
    begins: frozenset[str] = frozenset()
    balanced: bool | None = None


@dataclass(frozen=True)
class ContextSplit:
    """Result of splitting a model over cp.

    partial: parameters whose gradients must be summed over cp after backward. notes: messages for the user.
    """

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
    """Split the positions of the chain `blocks` over the cp axis. Replaces the `forward` of the blocks in place.

    blocks: names of the whole chain in order. The first argument and the result of each block are hidden states (B, T,
    ...). held: blocks on this rank (default: all). tried: the result of running the model on parts (see
    positionwise.py). Call this after the model is split over tp and before recomputation is set up. Raises
    StrategyError for blocks that mix positions by other means than scaled_dot_product_attention. Without `tried`,
    mixing that only a run shows raises it in the first forward pass.
    """
    group = axes.group("cp")
    if group is None:
        return ContextSplit()
    if not blocks:
        raise StrategyError(
            "Context parallelism needs the model's chain of blocks, and none is known.",
            numbers=f"cp={axes.size('cp')}",
            hint="hints=nbkit.ModelHints(stages=[...]) names them; or a strategy without cp",
        )
    if tried is None:
        check_attention(module, tried=False)
    found = tried if tried is not None else Positionwise()
    first, last = ends(blocks, found.begins)
    peers = Peers(group, head_and_tail if found.balanced else contiguous)
    own = [name for name in blocks if held is None or name in held]
    for name in own:
        block, way = module.get_submodule(name), found.ways.get(name, PositionMethod())
        check_mixing(name, block)
        wrapper = Spread(
            name,
            peers,
            first=name in first,
            last=name in last,
            strict=axes.size("tp") == 1,
            attends=tried is None,
            way=way,
        )
        for path in sorted(way.whole):
            part = block.get_submodule(path)
            part.forward = on_all(part.forward)  # type: ignore[method-assign]
        block.forward = wrapper.around(block.forward)  # type: ignore[method-assign]
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            # The nested tensors of evaluation have no dim of positions.
            part.use_nested_tensor = False
    module.register_forward_pre_hook(_note_positions, with_kwargs=True)
    whole = [f"{name}.{path}" for name in own for path in sorted(found.ways.get(name, PositionMethod()).whole)]
    num = axes.size("cp")
    how = " of a chunk from the head and one from the tail" if found.balanced else ""
    notes = [f"positions in {num} parts{how}; embedding and head see all"]
    if found.balanced is False:
        notes.append(f"causal attention costs the last of {num} contiguous parts {2 * num / (num + 1):.2f} of the mean")
    notes += [f"all positions, on every rank, are in {', '.join(whole)}"] if whole else []
    return ContextSplit(_partial(module, own, found.between), tuple(notes))


def ends(blocks: Sequence[str], begins: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return (first blocks of all chains, last blocks of all chains)."""
    first = frozenset(name for i, name in enumerate(blocks) if not i or name in begins)
    last = frozenset(name for i, name in enumerate(blocks) if i + 1 == len(blocks) or blocks[i + 1] in begins)
    return first, last


def _note_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the number of positions from the first input with a dim 1. Later pipeline stages need this."""
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
    """Wraps the forward of a block so that it works on a part of the positions.

    first, last: True if the block is the first or last of a chain. strict: refuse hidden states that are not the rank's
    part. attends: refuse a block without attention. noted: receives the numbers of the attention calls with whole keys,
    if `way` does not determine them.
    """

    name: str
    peers: Peers
    first: bool
    last: bool
    strict: bool
    attends: bool = True
    way: PositionMethod = PositionMethod()
    noted: set[int] | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = argument_names(forward)

        @wraps(forward)
        def spread(*args: Any, **kwargs: Any) -> Any:
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            hidden = self._hidden(next(iter(named.values()), None))
            total = self._total(hidden)
            if not torch.is_grad_enabled() and (_together.get() or total < 2 * self.peers.size()):
                # For the first tokens of a generation, and caches for later ones, every rank computes all positions.
                return forward(*args, **kwargs)
            attention = ContextAttentionMode(
                self.peers, total, self.way.across, lambda what, numbers: self._refusal(what, numbers, total)
            )
            if self.strict and not self.first and hidden.shape[1] != attention.own:
                raise self._refusal("receives another number of positions than its part.", f"{hidden.shape[1]}", total)
            labels = [*names[: len(args)], *[""] * (len(args) - len(names))]
            given: dict[int, Tensor] = {}
            placed = [
                self._placed(i == 0, label, x, hidden, total, given)
                for i, (label, x) in enumerate(zip(labels, args, strict=True))
            ]
            of_kwargs = {
                key: self._placed(not args and key == next(iter(kwargs)), key, x, hidden, total, given)
                for key, x in kwargs.items()
            }
            with extent("sequence", attention.runs, total), working_on(BlockPart(attention, given)), attention:
                output = forward(*placed, **of_kwargs)
            if self.noted is not None:
                self.noted.update(attention.noted)
            if self.attends and not attention.calls:
                hint = "attention by F.scaled_dot_product_attention"
                raise self._refusal("calls no attention that context parallelism knows.", "0 calls", total, hint)
            return tree_map_only(Tensor, partial(self._joined, attention.own, total), output) if self.last else output

        return spread

    def _hidden(self, value: Any) -> Tensor:
        """Return the first tensor of the first argument: hidden states (B, T, ...)."""
        found = next((x for x in tree_leaves(value) if isinstance(x, Tensor)), None)
        if found is None or found.ndim < 3:
            raise self._refusal(
                "does not get hidden states of the shape (samples, positions, width) as its first argument.", "", None
            )
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

    def _placed(
        self, carried: bool, name: str, value: Any, hidden: Tensor, total: int, given: dict[int, Tensor]
    ) -> Any:
        """Return the form of an argument that the block gets for a part of the positions. given: see BlockPart."""
        if carried:
            return tree_map_only(Tensor, lambda x: self.peers.split(whole(x), 1), value) if self.first else value
        if name in self.way.in_parts:
            return value
        return tree_map_only(Tensor, lambda x: self._beside(name, whole(x), hidden, total, given), value)

    def _beside(self, name: str, x: Tensor, hidden: Tensor, total: int, given: dict[int, Tensor]) -> Tensor:
        dim = None if name in self.way.uncut else dim_of_positions(name.lower(), x, hidden, total)
        used_by_all = self.peers.copy(x) if x.requires_grad else x
        placed = used_by_all if dim is None else self.peers.split(x, dim)
        given[id(placed)] = used_by_all
        return placed

    def _joined(self, part: int, total: int, x: Tensor) -> Tensor:
        return self.peers.join(whole(x), 1, total) if x.ndim > 2 and x.shape[1] == part else x

    def _refusal(
        self, what: str, numbers: str, total: int | None, hint: str = "a strategy without cp"
    ) -> StrategyError:
        counted = f"{total} positions over {self.peers}" if total is not None else str(self.peers)
        parts = (part for part in (counted, numbers) if part)
        return StrategyError(f"The block {self.name!r} {what}", numbers=", ".join(parts), hint=hint)


def dim_of_positions(name: str, x: Tensor, hidden: Tensor, total: int) -> int | None:
    """Return the dim of positions of an argument (rotary table, position ids, gate), or None.

    Masks are split later.
    """
    shape = x.shape
    if any(word in name for word in MASKS):
        return None
    if x.ndim >= 3:
        return next((dim for dim in range(1, x.ndim - 1) if shape[dim] == total), None)
    if x.ndim == 2 and not x.is_floating_point() and not x.is_complex():
        return 1 if shape[1] == total else None
    # Tables have no dim of samples. A vector with a value per sample is not a table, even if T equals B.
    per_sample = shape[:1] == hidden.shape[:1] and (x.requires_grad or "position" not in name)
    return 0 if x.ndim and shape[0] == total and not per_sample else None
