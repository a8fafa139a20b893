"""Whether a model computes each position by itself, attention aside: found by running it on parts of the positions.

Context parallelism is right for such models alone, and which they are cannot be read off their modules: `cumsum`,
`x[:, :1]` or a table looked up by position are calls. Everything happens on one process, before the first step:

1. the model runs whole on an example; what goes into each block and comes out of it is kept;
2. each block runs on all positions and on parts of them, forward and backward: see block_parts;
3. the model runs on each part, its blocks replaced by what they gave: see model_parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.parallel.context.block_proof import BlockCall, block_rules, refusal
from nbkit.rank.parallel.context.context_parallel import Positionwise
from nbkit.rank.parallel.context.model_proof import Between, replaced, run_between
from nbkit.rank.parallel.context.random_draws import Draws, DroppingNothing
from nbkit.rank.parallel.context.refusals import check_attention, check_mixing
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.pipeline.layer_chain import unchanged
from nbkit.rank.parallel.pipeline.partial_forward import plain_attention
from nbkit.rank.parallel.pipeline.trace_dataflow import SHAPE_ONLY, tensors_in
from nbkit.rank.rng.seeding import set_seed

__all__ = ["try_in_parts"]

_SIZES = (3, 2, 5, 7, 4)
"""Numbers of parts to try with; better parts of other lengths, so that what goes by windows shows."""


def try_in_parts(
    module: nn.Module,
    blocks: Sequence[str],
    call: Callable[[], Any],
    loss: Callable[[Any], Tensor] | None = None,
) -> Positionwise:
    """What running `module`, which is in the mode in which it trains, on parts of the positions shows.

    blocks: names of the chain in order. call: runs the whole model once on an example and returns its output; loss: of
    that output. The module is afterwards as before.
    """
    try:
        check_attention(module)
        for name in blocks:
            check_mixing(name, module.get_submodule(name))
        with unchanged(module), plain_attention(), _thawed(module):
            found = _tried(module, blocks, call, loss)
    except NbkitError as error:
        return Positionwise(StrategyError(error.what, numbers=error.numbers, hint=error.hint))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Positionwise(refusal("The model does not run on a part of the positions.", said[:300]))
    in_parts = {name: frozenset(labels) for name, labels in found.in_parts.items()}
    return Positionwise(None, frozenset(found.inner), in_parts)


def _tried(
    module: nn.Module, blocks: Sequence[str], call: Callable[[], Any], loss: Callable[[Any], Tensor] | None
) -> Between:
    draws: list[str] = []
    calls, uses, attentions = list[BlockCall](), _Uses(module, blocks), _Attentions()

    def run() -> Any:
        set_seed(0)
        # Dropping, attention is computed otherwise: it is counted before.
        with DroppingNothing(), attentions, Draws(draws):
            return call()

    def record(name: str, forward: Any) -> Callable[..., Any]:
        return _recording(name, forward, calls, uses)

    with torch.no_grad(), uses, replaced(module, blocks, record):
        whole = run()
    if attentions.count == 0:
        raise refusal("No block attends by F.scaled_dot_product_attention.", f"{len(calls)} calls of blocks")
    _try_blocks(module, calls)
    found = Between(inner=uses.foreign)
    try:
        run_between(module, calls, run, whole, loss, _size(calls), found)
    except StrategyError:
        if not draws:
            raise
        raise refusal(
            "The model draws random numbers by itself between its blocks: a part of the positions gets others.",
            f"by {draws[0]}",
            "nn.Dropout and F.dropout, which are keyed; or a strategy without cp",
        ) from None
    if both := sorted(found.outer & (found.inner | uses.inside)):
        raise refusal(
            f"The parameter {both[0]!r} is used within the blocks and outside of them.",
            "within, a rank's gradient is of its positions; outside, of all positions",
            "a strategy without cp",
        )
    return found


def _try_blocks(module: nn.Module, calls: Sequence[BlockCall]) -> None:
    """Find the rules of each call; those of calls that are alike in every respect once, with gradients once a class."""
    known: dict[Any, Any] = {}
    built: set[Any] = set()
    for called in calls:
        block = module.get_submodule(called.name)
        structure, setting = _kind(block, called)
        if (structure, setting) not in known:
            backward = structure not in built
            known[structure, setting] = block_rules(block, called, _size(calls), backward=backward)
            built.add(structure)
        called.rules = known[structure, setting]


def _size(calls: Sequence[BlockCall]) -> int:
    """Into how many parts to cut: where there is a choice, parts of several lengths."""
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


def _recording(name: str, forward: Any, calls: list[BlockCall], uses: _Uses) -> Callable[..., Any]:
    """The forward of a block, which keeps what goes in and comes out in `calls`."""

    @wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # Copies: what is changed in place later, and views of parameters, which are no use of the block's own.
        call = BlockCall(name, *tree_map_only(Tensor, torch.clone, (args, kwargs)))
        given, named = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with uses.within(name):
            output = forward(*given, **named)
        call.output = tree_map_only(Tensor, torch.clone, output)
        calls.append(call)
        return output

    return recorded


class _Uses(TorchDispatchMode):
    """foreign: names of parameters that a block uses and does not hold; inside: of those that blocks hold."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.foreign, self._block = set[str](), ""
        within = {id(part) for name in blocks for part in module.get_submodule(name).modules()}
        places = homes(module)
        self.inside = {name for name, at in places.items() if any(id(part) in within for part, _ in at)}
        self._memory = {_memory(getattr(*at[0])): name for name, at in places.items() if name not in self.inside}

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A block is at work."""
        self._block, before = name, self._block
        try:
            yield
        finally:
            self._block = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._block and func.overloadpacket not in SHAPE_ONLY:
            for tensor in tensors_in((args, kwargs)):
                if (name := self._memory.get(_memory(tensor))) is not None:
                    self.foreign.add(name)
        return func(*args, **(kwargs or {}))


class _Attentions(TorchFunctionMode):
    """Counts the calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        return func(*args, **(kwargs or {}))


def _kind(block: nn.Module, called: BlockCall) -> tuple[Any, Any]:
    """(how a block is built, its settings and how it is called): blocks that have both alike compute alike."""
    parts = list(block.modules())
    structure = tuple(
        (type(part), tuple(tuple(p.shape) for p in part._parameters.values() if p is not None)) for part in parts
    )
    settings = tuple(
        tuple((key, _setting(value)) for key, value in vars(part).items() if not key.startswith("_")) for part in parts
    )
    given = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _setting(leaf)
        for leaf in tree_leaves((called.args, called.kwargs))
    )
    return structure, (settings, given, tuple(called.kwargs))


def _setting(value: Any) -> Any:
    simple = value is None or isinstance(value, str | int | float)
    return value if simple else repr(value) if isinstance(value, list | tuple | dict) else id(value)


@contextmanager
def _thawed(module: nn.Module) -> Iterator[None]:
    """Inside, everything is trained: what is frozen now may be thawed later."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    try:
        for p, _ in before:
            p.requires_grad_(p.is_floating_point() or p.is_complex())
        yield
    finally:
        for p, trained in before:
            p.requires_grad_(trained)


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
