"""Modules within a block that every rank runs on all positions, its others on a part: attention written by hand.

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

from torch import Tensor, nn

from nbkit.rank.parallel.context.attention import Attention
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.rank.rng.shard_offsets import gathered
from nbkit.rank.torch_private import tree_leaves, tree_map_only

MASKS = ("mask", "bias", "padding")
"""What is in the names of arguments that hold no positions to be parted, but who may attend to whom."""


@dataclass(frozen=True)
class Part:
    """What a block works on. attention: of it. given: id -> what an argument of the block was before it was parted."""

    attention: Attention
    given: Mapping[int, Tensor]

    def whole(self, name: str, x: Tensor) -> Tensor:
        """An argument of a module in the block, of all positions."""
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


_part: ContextVar[Part | None] = ContextVar("part", default=None)


@contextmanager
def working_on(part: Part) -> Iterator[None]:
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
