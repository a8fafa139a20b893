"""Proves that a model computes each position by itself, attention aside, by running it on parts of the positions.

Context parallelism is right for such models alone, or where the modules that need all positions are run on all, and
which they are cannot be read off their modules: `cumsum`,
`x[:, :1]` or a table looked up by position are calls. Everything happens on one process, before the first step:

1. the model runs whole on an example; what goes into each block and comes out of it is kept;
2. each block runs on all positions and on parts of them, forward and backward: see block_proof;
3. the model runs on each part, its blocks replaced by what they gave: see between_blocks_proof. Where all positions
   come to a block (a decoder behind an encoder, a second tower), a chain of its own begins, and 2 and 3 run again.

Where attention is causal, a part is a chunk from the head of the positions and one from their tail. What is not right
on such parts is tried on contiguous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.parallel.context.between_blocks_proof import Begins, Between, labels, replaced, run_between
from nbkit.rank.parallel.context.block_proof import BlockCall, Cut, block_rules, refusal
from nbkit.rank.parallel.context.context_parallel import Positionwise
from nbkit.rank.parallel.context.refusals import check_attention, check_mixing
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.proof.calls import key_of
from nbkit.rank.parallel.proof.memory import MemoryUses, memory_of
from nbkit.rank.parallel.proof.random_draws import Draws, DroppingNothing
from nbkit.rank.parallel.proof.unchanged import thaw, unchanged
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import tree_leaves, tree_map_only
from nbkit.tensor_layout import Parting, contiguous, head_and_tail

_IS_CAUSAL = 5
"""The place of `is_causal` among the arguments of F.scaled_dot_product_attention."""

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
        check_attention(module, tried=True)
        for name in blocks:
            check_mixing(name, module.get_submodule(name))
        with unchanged(module):
            thaw(module)  # what is frozen now may be thawed later
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
        # Dropping, attention is computed otherwise: it is counted before.
        with DroppingNothing(), attentions, Draws(draws):
            return call()

    def record(name: str, forward: Any) -> Callable[..., Any]:
        return _recording(name, forward, calls, uses)

    with torch.no_grad(), replaced(module, blocks, record):
        whole = run()

    def proven(parting: Parting) -> Positionwise:
        cut = Cut(_size(calls), parting)
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
        # Whatever it was: what is wrong on contiguous parts too, those say.
        return replace(proven(contiguous), balanced=False)


def _chains(
    module: nn.Module,
    calls: Sequence[BlockCall],
    run: Callable[[], Any],
    whole: Any,
    loss: Callable[[Any], Tensor] | None,
    cut: Cut,
    used: Collection[str],
    *,
    attends: bool,
    draws: Sequence[str],
) -> tuple[frozenset[str], Between]:
    """(the blocks with which further chains begin, what is between blocks); rules and ways are put into `calls`.

    whole: what `run` gives; used: parameters of others that blocks use; attends: whether any block does by a function
    that is known; draws: random numbers that the model draws by itself.
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
    """Find rules and way of each call; of calls that are alike in every respect once, with gradients once a class.

    begins: blocks with which a further chain begins; what those behind get from the chain before stays whole.
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
                Cut(_size([called]), parting),
                backward=backward,
                uncut=uncut[::-1] if further else uncut,
            )
            built.add((structure, further))
        called.rules, called.way = known[structure, setting, further]


def _uncut(block: nn.Module, called: BlockCall) -> frozenset[str]:
    """Arguments that may be what an encoder gave, which attention alone looks at."""
    named = {**dict(zip(labels(block.forward, called.args), called.args, strict=True)), **called.kwargs}
    return frozenset(
        name
        for i, (name, value) in enumerate(named.items())
        if i and isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()
    )


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


def _recording(name: str, forward: Any, calls: list[BlockCall], uses: MemoryUses[str]) -> Callable[..., Any]:
    """The forward of a block, which keeps what goes in and comes out in `calls`. uses: parameters that others hold."""

    @wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # Copies: what is changed in place later, and views of parameters, which are no use of the block's own.
        call = BlockCall(name, *tree_map_only(Tensor, torch.clone, (args, kwargs)))
        given, named = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with uses:
            output = forward(*given, **named)
        call.output = tree_map_only(Tensor, torch.clone, output)
        calls.append(call)
        return output

    return recorded


class _Attentions(TorchFunctionMode):
    """Counts the calls of attention. causal: those of them whose kernel leaves out what is masked."""

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
    """(how a block is built, its settings and how it is called): blocks that have both alike compute alike."""
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
