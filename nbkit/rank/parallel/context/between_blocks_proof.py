"""Proves that what a model does between its blocks is right on parts of the positions, the blocks replaced.

A block gives its part of what it gave when the model ran whole, so that nothing of it is computed, and what arrives at
the next one can be compared exactly. From the graph between them follows which parameters work on a part there: the
gradients of those must be summed over the ranks, as those in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.context.block_proof import BlockCall, Cut, refusal
from nbkit.rank.parallel.context.context_parallel import dim_of_positions, ends
from nbkit.rank.parallel.context.whole_modules import argument_names
from nbkit.rank.parallel.proof.compare import gap
from nbkit.rank.parallel.proof.graph import nodes_behind
from nbkit.rank.parallel.proof.memory import tensors_in
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import tree_flatten, tree_leaves, tree_unflatten

_ROUNDING = 32
"""Times the precision of a dtype: what an operation on fewer positions may round otherwise."""


@dataclass
class Between:
    """in_parts: block -> arguments beside the hidden states that are computed from a part of them.

    inner, outer: names of parameters that work on a part of the positions, or on all of them, outside of the blocks.
    """

    in_parts: dict[str, set[str]] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)


class Begins(Exception):
    """All positions come to `block`, behind others: a chain of its own begins there."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.block = block


@contextmanager
def replaced(module: nn.Module, names: Sequence[str], make: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside, the forward of each of the blocks is make(name, its forward)."""
    blocks = {name: module.get_submodule(name) for name in names}
    before = {name: vars(block).get("forward") for name, block in blocks.items()}
    try:
        for name, block in blocks.items():
            block.forward = make(name, block.forward)
        yield
    finally:
        for name, block in blocks.items():
            if (forward := before[name]) is None:
                del block.forward
            else:
                block.forward = forward


def run_between(
    module: nn.Module,
    calls: Sequence[BlockCall],
    run: Callable[[], Any],
    whole: Any,
    loss: Callable[[Any], Tensor] | None,
    cut: Cut,
    found: Between,
    begins: frozenset[str] = frozenset(),
) -> None:
    """Run the model on each of the parts, with what `calls` returned; note in `found` what it shows.

    whole: what `run` gave on all positions; loss: of what it gives. begins: blocks with which further chains begin.
    Raises Begins at a block to which all positions come, and StrategyError where a part is no part of the whole.
    """
    names = list(dict.fromkeys(call.name for call in calls))
    first, last = ends(names, begins)
    params = {id(p): name for name, p in module.named_parameters()}
    for rank in range(cut.size):
        part = _Part(calls, first, last, rank, cut, params, found)
        set_seed(0)
        with replaced(module, names, part.instead):
            output = run()
        if part.at != len(calls):
            raise refusal("On a part of the positions, the model calls fewer blocks.", f"{part.at} of {len(calls)}")
        part.compare_output(output, whole)
        if loss is not None:
            found.outer.update(part.below(loss(output)))


@dataclass
class _Part:
    """The run of one part. first, last: blocks at the ends of chains. params: id -> name; at: calls so far.

    copies: leaves that stand for what every part of a block gave whole; of its gradient, each has a share.
    """

    calls: Sequence[BlockCall]
    first: frozenset[str]
    last: frozenset[str]
    rank: int
    cut: Cut
    params: Mapping[int, str]
    found: Between
    at: int = 0
    copies: list[Tensor] = field(default_factory=list)

    def instead(self, name: str, forward: Any) -> Callable[..., Any]:
        """What stands for the forward of the block `name`."""

        def given(*args: Any, **kwargs: Any) -> Any:
            if self.at == len(self.calls) or self.calls[self.at].name != name:
                raise refusal("On a part of the positions, the model calls its blocks in another order.", name)
            call = self.calls[self.at]
            self.at += 1
            self._arrived(call, args, kwargs, labels(forward, args))
            return self._returned(call)

        return given

    def _arrived(self, call: BlockCall, args: Any, kwargs: Any, names: Sequence[str]) -> None:
        expected: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
        arrived: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if expected.keys() != arrived.keys():
            raise refusal(f"On a part of the positions, {call.name!r} is called with other arguments.")
        carried = next(iter(expected), None)
        first = call.name in self.first
        hidden = next((x for x in tree_leaves(expected[carried]) if isinstance(x, Tensor)), None)
        for key, whole in expected.items():
            label = names[key] if isinstance(key, int) else key
            (old, spec), (new, other) = tree_flatten(whole), tree_flatten(arrived[key])
            if spec != other:
                raise self._strange(call, label)
            cuts = [self._cut(a, b, label, hidden, carried=key == carried) for a, b in zip(old, new, strict=True)]
            shared = any(isinstance(x, Tensor) and self._shared(x) for x in new)
            if key == carried and not first and None not in cuts and "part" not in cuts and not shared:
                raise Begins(call.name)
            if None in cuts or (key == carried and not first and "whole" in cuts):
                raise self._strange(call, label)
            if key == carried and first and ("part" in cuts or shared):
                raise self._strange(call, label)
            if "part" in cuts and "whole" in cuts and not (shared and key != carried):
                raise self._strange(call, label)
            inner = "part" in cuts or shared
            if key != carried and inner:
                if label in call.way.uncut:
                    raise self._strange(call, label)
                self.found.in_parts.setdefault(call.name, set()).add(label)
            for x in new:
                if isinstance(x, Tensor):
                    (self.found.inner if inner else self.found.outer).update(self.below(x))

    def _cut(self, whole: Any, part: Any, label: str, hidden: Tensor | None, *, carried: bool) -> str | None:
        """ "whole", "part" or, of what is no tensor, "same"; None where `part` is nothing of the kind."""
        if not isinstance(whole, Tensor):
            simple = isinstance(whole, int | float | str | bool | None)
            return "same" if not simple or whole == part else None
        if not isinstance(part, Tensor) or whole.ndim != part.ndim:
            return None
        if whole.shape == part.shape:
            return "whole" if gap(whole, part) <= _tolerance(whole) else None
        total = hidden.shape[1] if hidden is not None and hidden.ndim > 1 else 0
        dim = 1 if carried or hidden is None else dim_of_positions(label.lower(), whole, hidden, total)
        if dim is None or whole.ndim <= dim:
            return None
        expected = self._slice(whole, dim)
        return "part" if expected.shape == part.shape and gap(expected, part) <= _tolerance(whole) else None

    def _shared(self, x: Tensor) -> bool:
        """Whether it is computed from what every part of a block gave whole."""
        if not self.copies:
            return False
        leaves = {id(getattr(node, "variable", None)) for node in nodes_behind([x])}
        return any(id(copy) in leaves for copy in self.copies)

    def _strange(self, call: BlockCall, label: str) -> Exception:
        before = self.calls[self.at - 2].name if self.at > 1 else "the beginning"
        return refusal(
            f"What the model computes between {before!r} and {call.name!r} needs all positions.",
            f"on a part of them, the argument {label!r} is not the part of what it is on all",
        )

    def _slice(self, whole: Tensor, dim: int) -> Tensor:
        return taken(whole, dim, self.cut.parting(whole.shape[dim], self.cut.size, self.rank))

    def _returned(self, call: BlockCall) -> Any:
        leaves, spec = tree_flatten(call.output)
        rules, last = iter(call.rules), call.name in self.last
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                rule = next(rules)
                # As Spread: the last block gives all positions again of what has a width.
                if rule is not None and not (last and rule == 1 and leaf.ndim > 2):
                    leaf = self._slice(leaf, rule)
                leaf = leaf.detach().clone()
                if leaf.is_floating_point() and torch.is_grad_enabled():
                    if rule is None:
                        self.copies.append(leaf)
                    leaf = leaf.requires_grad_(True).clone()  # no leaf of autograd: it may change in place
            given.append(leaf)
        return tree_unflatten(given, spec)

    def below(self, tensor: Tensor) -> set[str]:
        """Names of the parameters that `tensor` was computed from, since the last block."""
        if id(tensor) in self.params:
            return {self.params[id(tensor)]}
        nodes = list(nodes_behind([tensor]))
        if any("CheckpointFunction" in node.name() for node in nodes):
            raise refusal(
                "The model recomputes what is between its blocks in a way that hides which parameters it uses.",
                "torch.utils.checkpoint with use_reentrant=True",
                "use_reentrant=False, or recompute=True of the Trainer",
            )
        leaves = (id(getattr(node, "variable", None)) for node in nodes)
        return {self.params[leaf] for leaf in leaves if leaf in self.params}

    def compare_output(self, output: Any, whole: Any) -> None:
        """Raises StrategyError where the model's output is not what it is on all positions."""
        new, old = tensors_in(output), tensors_in(whole)
        if len(new) != len(old) or any(gap(a, b) > _tolerance(a) for a, b in zip(old, new, strict=True)):
            raise refusal(
                "What the model gives is not what it gives on all positions, although its blocks do.",
                "something of a block's part goes around the last block, or into the output by itself",
            )
        for x in new:
            self._alone(x)
            self.found.outer.update(self.below(x))

    def _alone(self, x: Tensor) -> None:
        if self._shared(x):
            raise refusal(
                "What every part of a block gives whole goes into the model's output.",
                "outside of the blocks its gradient is whole, within them a share",
            )


def labels(forward: Any, args: Sequence[Any]) -> list[str]:
    """Names of positional arguments; "" for those that have none."""
    names = argument_names(forward)
    return [*names[: len(args)], *[""] * (len(args) - len(names))]


def _tolerance(x: Tensor) -> float:
    return _ROUNDING * torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0
