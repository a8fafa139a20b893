"""The blocks of an unmodified model as a chain that can be cut. The chain is found by running the model, and proven by
running the model cut.

The model runs on an example while `DataflowTrace` watches, once in evaluation and once in training. Consider all values
that depend on parameters and are used after the entry of a block. A cut there is correct if each of them is an argument
of the block, or the output of an earlier module, which is sent too. Then the model runs once more, cut everywhere, and
its output must be the same. Nothing is traced or rewritten: a stage runs the user's own forward.

`hidden_between` finds the shape of the tensor between blocks. It determines what tensor, pipeline and context
parallelism send.

`measure_costs` measures the seconds of each piece's forward and backward on this device. The model runs whole, so the
numbers do not contain the cost of cutting. Clocks are read where a block begins: when it is called, and when the
gradient of its input is complete. The code before the first block and after the last one (embedding, head, loss) is
timed separately. Blocks that are alike, get tensors of the same shapes and make the same multiplications cost the same.
Differences between their measurements are noise, which must not influence the cuts. For other parts, multiplications
decide if runs disagree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.device import accelerator
from nbkit.rank.forward_work import ForwardWork
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.pipeline.partial_forward import StageBoundaries
from nbkit.rank.parallel.pipeline.trace_dataflow import DataflowTrace, StageInput
from nbkit.rank.parallel.proof.observe import call_counts, gap, run_backward, tensors_in, watched
from nbkit.rank.parallel.proof.unchanged import Draws, set_evaluation, unchanged
from nbkit.rank.torch_private import pytree

_HINT = "hints=nbkit.ModelHints(stages=['...']) with the names of the modules that begin stages 1, 2, ..."


@dataclass(frozen=True)
class LayerChain:
    """The places where a model can be cut. Plain data: picklable, and equal on all ranks.

    blocks: names of the modules with which pieces begin. Piece i reaches from the call of blocks[i] to the call of
    blocks[i + 1]. The first piece begins with the model's forward, whatever blocks[0] is ("" if stages were given), and
    the last one ends with it. entries: the inputs of each block; `entries[i].carried` lists what crosses a cut there.
    parameters: the parameters that each piece uses, by their first names. A tied parameter is in several pieces.
    before, after: the parameters used before the first block and after the last one. skipped: modules with parameters
    that later pieces need not run. units: every block, including blocks that cannot begin a piece. refused: (block, why
    no piece can begin with it). recomputes: True if the model's own checkpointing calls blocks again in the backward
    pass. unrepeated: (block, why) if it does so in a way that no stage can repeat.
    """

    blocks: tuple[str, ...]
    entries: tuple[StageInput, ...]
    parameters: tuple[tuple[str, ...], ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    skipped: tuple[str, ...]
    units: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()
    recomputes: bool = False
    unrepeated: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def holds(self, lo: int, hi: int) -> set[str]:
        """Return the names of the parameters that pieces lo to hi - 1 use."""
        return {name for piece in self.parameters[lo:hi] for name in piece}

    def piece_of(self, name: str) -> int:
        """Return the piece that contains the module of the parameter or buffer `name`."""
        for piece, block in reversed(list(enumerate(self.blocks))):
            if block and name.startswith(f"{block}."):
                return piece
        module = name.rpartition(".")[0]
        behind = any(other.rpartition(".")[0] == module for other in self.after)
        return len(self) - 1 if behind else 0


def find_chain(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    stages: Sequence[str] | None = None,
    brief: Callable[[], Any] | None = None,
) -> LayerChain:
    """Return the chain of `module`.

    call: runs the forward pass of the whole model once on a real example, and returns its output. brief: does the same
    operations on smaller tensors. If it fails, `call` is used. stages: names of the modules that begin stages 1, 2,
    ..., in the order of their calls; None to find them. Parameters, buffers, modes and random generators are restored.
    Raises StrategyError if there is no chain, or if a cut at `stages` is impossible. The error names the modules that
    prevent it.
    """
    if brief is not None:
        with suppress(Exception):  # errors are reported from the full run below
            return _found(module, brief, stages)
    return _found(module, call, stages)


def _found(module: nn.Module, call: Callable[[], Any], stages: Sequence[str] | None) -> LayerChain:
    modes = [(part, part.training) for part in module.modules()]
    with unchanged(module):
        set_evaluation(module)
        with torch.no_grad():
            calls = call_counts(module, call)
        found = structural_blocks(module)
        names = list(stages) if stages is not None else found
        single = [name for name in calls if name in set(names) and calls[name] == 1]
        if stages is not None:
            _check_stages(module, names, single, calls)
        refused = [(name, f"the model calls it {calls.get(name, 0)} times") for name in names if name not in single]
        blocks = ["", *single] if stages is not None else single
        if len(blocks) < 2:
            raise _no_chain(module, refused)
        units = [name for name in calls if name in found]
        flow = _watch(module, blocks, (), modes, call)
        chain = None
        if flow.around:
            skipped = tuple(_skipped(flow, module, "", blocks, until=len(blocks)))
            with suppress(StrategyError):  # without the skipped outputs, some cuts may be possible
                chain = _proven(_watch(module, blocks, skipped, modes, call), units, refused, call, stages is not None)
        if chain is None:
            chain = _proven(flow, units, refused, call, stages is not None)
        for part, mode in modes:
            part.training = mode
        return _with_recomputation(module, chain, call)


def _watch(
    module: nn.Module,
    blocks: Sequence[str],
    skipped: Sequence[str],
    modes: Sequence[tuple[nn.Module, bool]],
    call: Callable[[], Any],
) -> DataflowTrace:
    """Return the dataflow in evaluation and in `modes`. The modules must be in evaluation mode."""
    flow = DataflowTrace(module, blocks, skipped)
    with torch.no_grad():
        flow.run(call)
    if any(mode for _, mode in modes):
        _watch_training(flow, modes, skipped, call)
        set_evaluation(module)
    return flow


def _proven(
    flow: DataflowTrace, units: Sequence[str], refused: Sequence[tuple[str, str]], call: Callable[[], Any], every: bool
) -> LayerChain:
    """Return the chain that `flow` shows. every: True if all cuts have to be correct."""
    refused = [*refused, *((flow.blocks[i], why) for i, why in sorted(flow.around.items()))]
    if len(flow.around) == len(flow.blocks) - 1 or (every and flow.around):
        raise _no_chain(flow.module, refused)
    chain = _chain(flow, units, refused)
    _prove(flow.module, chain, call)
    return chain


def _watch_training(
    flow: DataflowTrace, modes: Sequence[tuple[nn.Module, bool]], skipped: Sequence[str], call: Callable[[], Any]
) -> None:
    """Run the model in `modes` too. A penalty or noise that exists only in training may bypass a cut."""
    for part, mode in modes:
        part.training = mode
    with torch.no_grad():
        calls = call_counts(flow.module, call)
        blocks = [name for name in flow.blocks if name]
        if [name for name in calls if name in set(blocks)] != blocks or any(calls[name] > 1 for name in blocks):
            raise _no_chain(flow.module, [(blocks[0], "in training the model calls its blocks otherwise")])
        training = DataflowTrace(flow.module, flow.blocks, skipped)
        training.run(call)
    flow.join(training)


def _check_stages(module: nn.Module, names: list[str], single: list[str], calls: dict[str, int]) -> None:
    known = {name for name, _ in module.named_modules()}
    for name in names:
        if name not in known:
            raise StrategyError(
                f"stages= names {name!r}, which is no module of this model.",
                numbers=f"its blocks: {', '.join(structural_blocks(module)) or 'none'}",
                hint=_HINT,
            )
    if names != single:
        counts = ", ".join(f"{name} {calls.get(name, 0)} x" for name in names)
        raise StrategyError(
            "stages= must name modules that the model calls once, in the order of the calls.",
            numbers=f"called: {counts}" + (f"; in this order: {', '.join(single)}" if single else ""),
            hint=_HINT,
        )


def _no_chain(module: nn.Module, refused: Sequence[tuple[str, str]]) -> StrategyError:
    reasons = "; ".join(f"no stage can begin with {name}: {why}" for name, why in refused)
    return StrategyError(
        f"{type(module).__name__} cannot be cut into stages as it is.",
        numbers=reasons or "it has no two blocks that are called one after the other",
        hint=_HINT,
    )


def _chain(flow: DataflowTrace, units: Sequence[str], refused: Sequence[tuple[str, str]]) -> LayerChain:
    entries = flow.entries()
    kept = [i for i in range(len(flow.blocks)) if i not in flow.around]
    blocks = tuple(flow.blocks[i] for i in kept)
    piece_of = [sum(1 for k in kept[1:] if k <= i) for i in range(len(flow.blocks))]
    uses = _uses(flow)
    last = len(flow.blocks) + 1
    pieces: list[list[str]] = [[] for _ in blocks]
    for name, segments in uses.items():
        for piece in sorted({piece_of[min(max(s, 1), len(flow.blocks)) - 1] for s in segments}):
            pieces[piece].append(name)
    return LayerChain(
        blocks=blocks,
        entries=tuple(_entry(entries, kept, i) for i in kept),
        parameters=tuple(map(tuple, pieces)),
        before=tuple(name for name, segments in uses.items() if 0 in segments),
        after=tuple(name for name, segments in uses.items() if last in segments),
        skipped=tuple(_skipped(flow, flow.module, "", blocks, until=kept[-1])),
        units=tuple(units),
        refused=tuple(refused),
    )


def _uses(flow: DataflowTrace) -> dict[str, set[int]]:
    """Return parameter -> segments that use it. An unused parameter belongs to its block, or else to the beginning."""
    uses = {name: set(segments) for name, segments in flow.uses.items()}
    for name, segments in uses.items():
        if not segments:
            owners = [i for i, block in enumerate(flow.blocks) if block and name.startswith(f"{block}.")]
            segments.add(owners[0] + 1 if owners else 0)
    return uses


def _entry(entries: Sequence[StageInput], kept: Sequence[int], number: int) -> StageInput:
    """Return the entry of a block. Its `kept` refers to the previous block that can begin a piece."""
    entry = entries[number]
    before = max((k for k in kept if k < number), default=number)
    sources = dict(entry.kept)
    for i in range(number - 1, before, -1):
        sources = {path: entries[i].kept[at] for path, at in sources.items() if at in entries[i].kept}
    return StageInput(entry.carried, sources, entry.written, entry.skips)


def _skipped(flow: DataflowTrace, module: nn.Module, path: str, blocks: Sequence[str], *, until: int) -> Iterator[str]:
    """Yield the largest modules with parameters that contain no block and whose outputs all depend on parameters.

    Only modules that are called in the segments up to `until` are included.
    """
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if not any(True for _ in child.parameters()):
            continue
        holds_block = any(block.startswith(f"{at}.") for block in blocks)
        if at in flow.callers and at not in flow.opaque and not holds_block:
            if min(flow.callers[at]) <= until:
                yield at
        else:
            yield from _skipped(flow, child, at, blocks, until=until)


def _prove(module: nn.Module, chain: LayerChain, call: Callable[[], Any]) -> None:
    """Run the model whole and cut everywhere, in evaluation without random numbers. The outputs must be equal."""
    set_evaluation(module)
    gates, drawn = None, list[str]()
    try:
        with torch.no_grad(), Draws(drawn):
            whole = tensors_in(call())
            gates = StageBoundaries(module, chain.blocks, chain.entries, chain.skipped)
            value: Any = ()
            for i in range(len(chain)):
                try:
                    value = gates.run(i, i + 1, value, call)
                except StrategyError:
                    raise
                except Exception as error:
                    raise _wrong(chain, i, f"{type(error).__name__}: {error}") from error
        parts = tensors_in(value)
        if len(parts) != len(whole) or not all(map(_equal, whole, parts)):
            why = f"it draws random numbers by itself, by {drawn[0]}, and a stage draws others" if drawn else ""
            raise _wrong(chain, len(chain) - 1, why or "the output differs from that of the whole model")
    finally:
        if gates is not None:
            gates.remove()


def _with_recomputation(module: nn.Module, chain: LayerChain, call: Callable[[], Any]) -> LayerChain:
    """Return `chain` with information about the model's own checkpointing, which calls blocks again in backward.

    A stage can repeat this for a single block. It cannot repeat a segment of several blocks, because its first block
    has other inputs than those that the caller stores. It also cannot repeat a block whose inputs autograd does not see
    (reentrant checkpointing). Such a block runs without gradients first, and is called again in backward.
    """
    again: list[str] = []
    hidden: list[str] = []
    forward = True

    def enter(name: str, *_: Any) -> None:
        if not forward:
            again.append(name)
        elif not torch.is_grad_enabled():
            hidden.append(name)

    with watched(module, enter, names=[name for name in chain.blocks if name]):
        results = [t for t in tensors_in(call()) if t.requires_grad]
        forward = False
        if results:
            run_backward(results)
    if reentrant := [name for name in hidden if name in again]:
        return replace(chain, recomputes=True, unrepeated=(reentrant[0], "by reentrant checkpointing"))
    together = [a for a, b in pairwise(again) if chain.blocks.index(a) < chain.blocks.index(b)]
    return replace(
        chain,
        recomputes=bool(again),
        unrepeated=(together[0], "in a segment with the block behind it") if together else None,
    )


def _equal(whole: Tensor, part: Tensor) -> bool:
    # Allow rounding differences, because GPU kernels may add in another order.
    return whole.dtype == part.dtype and gap(whole, part) <= 1e-3


def _wrong(chain: LayerChain, number: int, why: str) -> StrategyError:
    begins = chain.blocks[number] or "the first stage"
    return StrategyError(
        f"Run in stages, the model does not give what it gives whole; seen in the one that begins with {begins}.",
        numbers=why[:300],
        hint=_HINT,
    )


def hidden_between(module: nn.Module, chain: LayerChain, call: Callable[[], Any]) -> tuple[int, int] | None:
    """Return (positions, width) if each block passes one tensor (rows, positions, width) to the next, else None.

    call: runs the whole model once. All blocks must pass the same shape.
    """
    seen: set[tuple[int, ...]] = set()

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        entry = chain.entries[chain.blocks.index(name)]
        paths = {path for path in entry.carried if path not in entry.kept}
        leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
        shapes = [tuple(leaf.shape) for key, leaf in leaves if pytree.keystr(key) in paths]
        seen.add(shapes[0] if len(shapes) == 1 and not entry.skips else ())

    with unchanged(module), watched(module, enter, names=chain.blocks[1:]), torch.no_grad():
        call()
    (shape, *others) = seen or {()}
    return (shape[1], shape[2]) if not others and len(shape) == 3 else None


_APART = 1.4  # blocks of a kind are not alike if their times differ by more than this factor in runs that agree
_AGREE = 1.1  # the two shortest runs agree if they differ by at most this factor
_REPEATS, _AT_MOST = 3, 9


def measure_costs(
    module: nn.Module, chain: LayerChain, call: Callable[[], Any], *, repeats: int = _REPEATS
) -> tuple[float, ...]:
    """Return the seconds of each piece, forward and backward: the minimum of `repeats` runs after one warm-up run.

    If runs disagree, up to `_AT_MOST` runs are made. call: runs the whole model once, and returns the output or the
    loss. The loss and the code after the last block count as part of the last piece, and the code before the first
    block as part of the first piece. Parameters, gradients, buffers and random generators are restored. Other ranks
    must be idle meanwhile. Raises StrategyError if the result of `call` does not depend on a parameter.
    """
    run = _TimedRun(module, chain, call)
    with unchanged(module):
        with ForwardWork() as work:
            run.kinds_of(work)
        runs = [run.seconds() for _ in range(repeats)]
        while repeats > 1 and len(runs) < _AT_MOST and not all(map(_agree, zip(*runs, strict=True))):
            runs.append(run.seconds())
    before, *blocks, after = _settled(runs, run.kinds, run.flops)
    blocks[0] += before
    blocks[-1] += after
    return tuple(blocks)


def _agree(seconds: Sequence[float]) -> bool:
    first, *others = sorted(seconds)
    return not others or others[0] <= _AGREE * first


def _settled(runs: Sequence[Sequence[float]], kinds: Sequence[Hashable], flops: Sequence[float]) -> list[float]:
    """Return the seconds of each part, combined from several runs. kinds: the kind of each part, or None."""
    parts = list(zip(*runs, strict=True))
    least, agree = [min(part) for part in parts], [_agree(part) for part in parts]
    alike: dict[Hashable, list[float]] = {}
    for kind, seconds in zip(kinds, least, strict=True):
        alike.setdefault(kind, []).append(seconds)
    found = []
    for kind, seconds, sure in zip(kinds, least, agree, strict=True):
        middle = median(alike[kind])
        close = middle / _APART <= seconds <= middle * _APART
        found.append(middle if kind is not None and (close or not sure) else seconds)
    work = sum(number for number, kind in zip(flops, kinds, strict=True) if kind is not None)
    rate = sum(seconds for seconds, kind in zip(found, kinds, strict=True) if kind is not None) / work if work else 0.0
    return [
        seconds if kind is not None or sure or not rate else min(seconds, number * rate)
        for seconds, kind, sure, number in zip(found, kinds, agree, flops, strict=True)
    ]


class _TimedRun:
    """Runs of a model that time its parts: before the first block, each block, and after the last one.

    kinds: a key for each part, equal for blocks that are alike; None for the first and the last part. flops: FLOPs of
    each part's forward.
    """

    def __init__(self, module: nn.Module, chain: LayerChain, call: Callable[[], Any]) -> None:
        self._module, self._chain, self._call = module, chain, call
        self._device = next(module.parameters()).device
        self.kinds: list[Hashable] = [None] * (len(chain) + 2)
        self.flops = [0.0] * (len(chain) + 2)

    def kinds_of(self, work: ForwardWork) -> None:
        """Run once, to warm up, and find the kind of each block. work: an entered ForwardWork."""
        marks = [0.0] * (len(self._chain) + 2)
        looks: dict[int, Hashable] = {}

        def enter(number: int, block: nn.Module, inputs: Any) -> None:
            marks[number + 1] = work.flops
            looks[number] = (repr(block), *(tuple(t.shape) for t in tensors_in(inputs)))

        def leave(_: Any) -> None:
            marks[-1] = work.flops

        end, _ = self._run(enter, leave, lambda: work.flops)
        self.flops = [b - a for a, b in pairwise([*marks, end])]
        for number, look in looks.items():
            self.kinds[number + 1] = (look, self.flops[number + 1])

    def seconds(self) -> list[float]:
        """Run once. Return the seconds of each part, forward and backward."""
        size = len(self._chain)
        called, arrived = [0.0] * (size + 2), [0.0] * (size + 2)

        def now() -> float:
            if accelerator().holds(self._device):
                accelerator().wait_for_all(self._device)
            return time.perf_counter()

        def arrive(place: int) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                arrived[place] = now()

            return note

        def enter(number: int, _: nn.Module, inputs: Any) -> None:
            entry = self._chain.entries[number]
            for key, leaf in pytree.tree_flatten_with_path(inputs)[0]:
                path = pytree.keystr(key)
                # If the caller passes a tensor to several blocks, its gradient is complete only at the first of them.
                inside = number == 0 or (path in entry.carried and path not in entry.kept)
                if inside and isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(arrive(number + 1))
            called[number + 1] = now()

        def leave(output: Any) -> None:
            called[-1] = now()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(arrive(size + 1))

        called[0] = now()
        end, back = self._run(enter, leave, now)
        # If no gradient arrives at a block, nothing before it runs backward (its parameters are frozen).
        starts = [back, *(one or back for one in arrived[1:-1]), arrived[-1] or end]
        forward = [b - a for a, b in pairwise([*called, end])]
        backward = [a - b for a, b in pairwise([*starts, end])]
        return [f + max(b, 0.0) for f, b in zip(forward, backward, strict=True)]

    def _run(
        self,
        enter: Callable[[int, nn.Module, Any], None],
        leave: Callable[[Any], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> tuple[float, float]:
        """Run forward and backward. Return their end times."""
        blocks, end = self._chain.blocks, 0.0

        def entered(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
            if not end:  # else the model's checkpointing recomputes the block, as a part of backward
                enter(blocks.index(name), block, (args, kwargs))

        def left(name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not end and name == blocks[-1]:
                leave(output)

        with watched(self._module, entered, left, names=blocks):
            results = [t for t in tensors_in(self._call()) if t.requires_grad]
            end = now()
            if not results:
                raise StrategyError(
                    "The output of the model does not depend on its parameters, so it has no backward pass to measure.",
                    numbers="no tensor of the output requires a gradient",
                    hint="measure with gradients enabled, and a parameter that is not frozen",
                )
            run_backward(results)
            back = now()
        for p in self._module.parameters():
            p.grad = None
        return end, back
