"""Prove that a model computes each position independently, except in attention, by running it on parts of the
positions.

Context parallelism is correct only for such models, or if modules that need all positions are run on all of them. The
list of modules does not show this: `cumsum`, `x[:, :1]` or a table indexed by position are function calls. The proof
runs in one process, before the first step:

1. The model runs whole on an example. The inputs and outputs of each block are recorded.
2. Each block runs on all positions and on parts of them, forward and backward: see block_proof.py.
3. The model runs on each part, with its blocks replaced (`run_between`). A block returns its part of the output that
was recorded in 1. So nothing in the block is computed, and the inputs of the next block can be compared exactly. The
graph between blocks shows which parameters there work on a part. Their gradients must be summed over the ranks, like
those in the blocks. If all positions arrive at a block (a decoder after an encoder, a second tower), a new chain begins
there, and 2 and 3 run again.

If attention is causal, a part consists of a chunk from the head of the positions and one from the tail. If that fails,
contiguous parts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.parallel.context.attention import argument_names
from nbkit.rank.parallel.context.block_proof import BlockCall, PositionSplit, block_rules, refusal
from nbkit.rank.parallel.context.context_parallel import (
    Positionwise,
    check_attention,
    check_mixing,
    dim_of_positions,
    ends,
)
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.proof.observe import MemoryUses, gap, key_of, memory_of, nodes_behind, tensors_in
from nbkit.rank.parallel.proof.unchanged import Draws, DroppingNothing, thaw, unchanged
from nbkit.rank.parallel.tensor.collectives import taken
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from nbkit.tensor_layout import Parting, contiguous, head_and_tail

_ROUNDING = 32
"""Allowed rounding difference of an operation on fewer positions, in multiples of the dtype's epsilon."""


@dataclass
class Between:
    """Findings about the code between blocks.

    in_parts: block -> arguments other than the hidden states that are computed from a part of the positions. inner:
    names of parameters outside of the blocks that work on a part of the positions. outer: names of those that work on
    all positions.
    """

    in_parts: dict[str, set[str]] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)


class Begins(Exception):
    """All positions arrive at `block`, which is not the first block. So a new chain begins there."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.block = block


@contextmanager
def replaced(module: nn.Module, names: Sequence[str], make: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replace the forward of each block by make(name, its forward) inside this context."""
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
    cut: PositionSplit,
    found: Between,
    begins: frozenset[str] = frozenset(),
) -> None:
    """Run the model on each part, with the recorded outputs of `calls` instead of the blocks. Add the findings to
    `found`.

    whole: output of `run` on all positions. loss: computes the loss of an output. begins: first blocks of further
    chains. Raises Begins at a block where all positions arrive, and StrategyError if a part does not match the whole.
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
    """The run of one part. first, last: blocks at the ends of chains. params: id -> name. at: number of calls so far.

    copies: leaves that replace tensors which every part of a block returns whole. Each has a share of the gradient.
    """

    calls: Sequence[BlockCall]
    first: frozenset[str]
    last: frozenset[str]
    rank: int
    cut: PositionSplit
    params: Mapping[int, str]
    found: Between
    at: int = 0
    copies: list[Tensor] = field(default_factory=list)

    def instead(self, name: str, forward: Any) -> Callable[..., Any]:
        """Return the function that replaces the forward of the block `name`."""

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
        """Return "whole", "part", or "same" for an equal object that is not a tensor; None if nothing matches."""
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
        """Return True if `x` is computed from a tensor that every part of a block returns whole."""
        if not self.copies:
            return False
        leaves = {id(getattr(node, "variable", None)) for node in nodes_behind([x])}
        return any(id(copy) in leaves for copy in self.copies)

    def _strange(self, call: BlockCall, label: str) -> Exception:
        before = self.calls[self.at - 2].name if self.at > 1 else "the beginning"
        return refusal(
            f"What the model computes between {before!r} and {call.name!r} needs all positions.",
            f"for a part of the positions, the argument {label!r} differs from this part of the whole argument",
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
                # As in Spread, the last block of a chain returns all positions of hidden states.
                if rule is not None and not (last and rule == 1 and leaf.ndim > 2):
                    leaf = self._slice(leaf, rule)
                leaf = leaf.detach().clone()
                if leaf.is_floating_point() and torch.is_grad_enabled():
                    if rule is None:
                        self.copies.append(leaf)
                    leaf = leaf.requires_grad_(True).clone()  # not a leaf of autograd, so it may be changed in place
            given.append(leaf)
        return tree_unflatten(given, spec)

    def below(self, tensor: Tensor) -> set[str]:
        """Return the names of the parameters from which `tensor` was computed since the last block."""
        if id(tensor) in self.params:
            return {self.params[id(tensor)]}
        nodes = list(nodes_behind([tensor]))
        if any("CheckpointFunction" in node.name() for node in nodes):
            raise refusal(
                "The model recomputes what is between its blocks in a way that hides which parameters it uses.",
                "torch.utils.checkpoint with use_reentrant=True",
                "use_reentrant=False, or compute=nbkit.Compute(recompute=True)",
            )
        leaves = (id(getattr(node, "variable", None)) for node in nodes)
        return {self.params[leaf] for leaf in leaves if leaf in self.params}

    def compare_output(self, output: Any, whole: Any) -> None:
        """Raise StrategyError if the model's output differs from its output on all positions."""
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
    """Return the names of positional arguments, or "" for those without a name."""
    names = argument_names(forward)
    return [*names[: len(args)], *[""] * (len(args) - len(names))]


def _tolerance(x: Tensor) -> float:
    return _ROUNDING * torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0


_IS_CAUSAL = 5
"""Index of `is_causal` among the arguments of F.scaled_dot_product_attention."""

_SIZES = (3, 2, 5, 7, 4)
"""Numbers of parts to choose from. Unequal parts are better, because they reveal operations on windows."""


def try_in_parts(
    module: nn.Module,
    blocks: Sequence[str],
    call: Callable[[], Any],
    loss: Callable[[Any], Tensor] | None = None,
) -> Positionwise:
    """Run `module` on parts of the positions, and return the result. The module must be in training mode.

    blocks: names of the chain in order. call: runs the whole model once on an example and returns its output. loss:
    computes the loss of that output. The module is restored.
    """
    try:
        check_attention(module, tried=True)
        for name in blocks:
            check_mixing(name, module.get_submodule(name))
        with unchanged(module):
            thaw(module)  # frozen parameters may be unfrozen later
            found = _tried(module, blocks, call, loss)
    except NbkitError as error:
        return Positionwise(StrategyError(error.what, numbers=error.numbers, hint=error.hint))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Positionwise(refusal("The model does not run on a part of the positions.", said[:300]))
    return found


def _tried(
    module: nn.Module, blocks: Sequence[str], call: Callable[[], Any], loss: Callable[[Any], Tensor] | None
) -> Positionwise:
    draws: list[str] = []
    calls, attentions, used = list[BlockCall](), _Attentions(), set[str]()
    parts = {id(part) for name in blocks for part in module.get_submodule(name).modules()}
    places = homes(module)
    inside = {name for name, at in places.items() if any(id(part) in parts for part, _ in at)}
    outside = {memory_of(getattr(*at[0])): name for name, at in places.items() if name not in inside}
    uses = MemoryUses(outside, lambda name, *_: used.add(name))

    def run() -> Any:
        set_seed(0)
        # The mode entered last sees calls first, so `attentions` sees attention before DroppingNothing replaces it.
        with DroppingNothing(), attentions, Draws(draws):
            return call()

    def record(name: str, forward: Any) -> Callable[..., Any]:
        return _recording(name, forward, calls, uses)

    with torch.no_grad(), replaced(module, blocks, record):
        whole = run()

    def proven(parting: Parting) -> Positionwise:
        cut = PositionSplit(_size(calls), parting)
        begins, between = _chains(module, calls, run, whole, loss, cut, used, attends=attentions.count > 0, draws=draws)
        if both := sorted(between.outer & (between.inner | inside)):
            raise refusal(
                f"The parameter {both[0]!r} is used within the blocks and outside of them.",
                "within, a rank's gradient is of its positions; outside, of all positions",
                "a strategy without cp",
            )
        ways = {each.name: replace(each.way, in_parts=frozenset(between.in_parts.get(each.name, ()))) for each in calls}
        return Positionwise(None, frozenset(between.inner), ways, begins)

    if not attentions.causal:
        return proven(contiguous)
    try:
        return replace(proven(head_and_tail), balanced=True)
    except Exception:
        # If contiguous parts fail too, their error is raised.
        return replace(proven(contiguous), balanced=False)


def _chains(
    module: nn.Module,
    calls: Sequence[BlockCall],
    run: Callable[[], Any],
    whole: Any,
    loss: Callable[[Any], Tensor] | None,
    cut: PositionSplit,
    used: Collection[str],
    *,
    attends: bool,
    draws: Sequence[str],
) -> tuple[frozenset[str], Between]:
    """Return (first blocks of further chains, findings between blocks). Sets the rules and ways of `calls`.

    whole: output of `run`. used: parameters outside of the blocks that blocks use. attends: True if a block calls a
    known attention function. draws: calls with which the model draws random numbers itself.
    """
    begins: frozenset[str] = frozenset()
    while True:
        _try_blocks(module, calls, begins, cut.parting)
        if not attends and not any(each.way.whole for each in calls):
            raise refusal("No block attends by F.scaled_dot_product_attention.", f"{len(calls)} calls of blocks")
        found = Between(inner=set(used))
        try:
            run_between(module, calls, run, whole, loss, cut, found, begins)
            return begins, found
        except Begins as chain:
            begins |= {chain.block}
        except StrategyError:
            if not draws:
                raise
            raise refusal(
                "The model draws random numbers by itself between its blocks: a part of the positions gets others.",
                f"by {draws[0]}",
                "nn.Dropout and F.dropout, which are keyed; or a strategy without cp",
            ) from None


def _try_blocks(module: nn.Module, calls: Sequence[BlockCall], begins: frozenset[str], parting: Parting) -> None:
    """Find the rules and way of each call. Equal calls are run once, with gradients once per structure.

    begins: first blocks of further chains. Arguments that come from an earlier chain stay whole there.
    """
    known: dict[Any, Any] = {}
    built: set[Any] = set()
    further = False
    for called in calls:
        further |= called.name in begins
        block = module.get_submodule(called.name)
        structure, setting = _kind(block, called)
        if (structure, setting, further) not in known:
            uncut = (frozenset[str](), _uncut(block, called))
            backward = (structure, further) not in built
            known[structure, setting, further] = block_rules(
                block,
                called,
                PositionSplit(_size([called]), parting),
                backward=backward,
                uncut=uncut[::-1] if further else uncut,
            )
            built.add((structure, further))
        called.rules, called.way = known[structure, setting, further]


def _uncut(block: nn.Module, called: BlockCall) -> frozenset[str]:
    """Return the arguments that may be the output of an encoder, which only attention reads."""
    named = {**dict(zip(labels(block.forward, called.args), called.args, strict=True)), **called.kwargs}
    return frozenset(
        name
        for i, (name, value) in enumerate(named.items())
        if i and isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()
    )


def _size(calls: Sequence[BlockCall]) -> int:
    """Return the number of parts for a split. Unequal parts are preferred."""
    first = calls[0] if calls else None
    total = 0
    for leaf in tree_leaves((first.args, first.kwargs)) if first is not None else []:
        if isinstance(leaf, Tensor):
            total = leaf.shape[1] if leaf.ndim > 2 else 0
            break
    fitting = [size for size in _SIZES if total >= 2 * size]
    if not fitting and total:
        raise refusal("The example is too short to try parts of its positions.", f"{total} positions, 4 are needed")
    return next((size for size in fitting if total % size), (fitting or [2])[0])


def _recording(name: str, forward: Any, calls: list[BlockCall], uses: MemoryUses[str]) -> Callable[..., Any]:
    """Wrap the forward of a block so that its inputs and output are recorded in `calls`.

    uses: watches the use of parameters from outside of the blocks.
    """

    @wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # Copy, because tensors may change in place later, and views of parameters are not uses by the block itself.
        call = BlockCall(name, *tree_map_only(Tensor, torch.clone, (args, kwargs)))
        given, named = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with uses:
            output = forward(*given, **named)
        call.output = tree_map_only(Tensor, torch.clone, output)
        calls.append(call)
        return output

    return recorded


class _Attentions(TorchFunctionMode):
    """Mode that counts the calls of attention. causal: number of calls with is_causal, which skip masked pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.causal = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        if func is F.scaled_dot_product_attention:
            self.causal += bool(kwargs.get("is_causal", args[_IS_CAUSAL] if len(args) > _IS_CAUSAL else False))
        return func(*args, **kwargs)


def _kind(block: nn.Module, called: BlockCall) -> tuple[Any, Any]:
    """Return (structure of a block, its settings and arguments). Blocks that agree in both compute the same."""
    parts = list(block.modules())
    structure = tuple(
        (type(part), tuple(tuple(p.shape) for p in part._parameters.values() if p is not None)) for part in parts
    )
    settings = tuple(
        tuple((key, key_of(value)) for key, value in vars(part).items() if not key.startswith("_")) for part in parts
    )
    given = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else key_of(leaf)
        for leaf in tree_leaves((called.args, called.kwargs))
    )
    return structure, (settings, given, tuple(called.kwargs))
