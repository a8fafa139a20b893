"""Measure the memory that computing a model needs, piece by piece, by running it on tensors without memory.

The module is split for the degrees of tp and cp of a strategy. It runs on torch's fake tensors, once with few rows and
once with twice as many. A model whose shapes depend on values, such as a mixture of experts, has to run with real
numbers: `real`.

`ForwardWork` counts multiplications, and the bytes that all other operations read and write. `LiveBytes` counts the
bytes of all live storages after each operation, like the allocator. `LoneGroup` replaces a group of ranks in one
process. Its operations send nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from dataclasses import replace as replaced
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.mesh import Mesh
from nbkit.planner.peak import ModelPiece, PeakLine, Updating, upper
from nbkit.rank.data.batch import call, pair, pick, rows_of
from nbkit.rank.forward_work import ForwardWork
from nbkit.rank.loss.row_weights import weigh
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.parallel.module.copies import homes, parameter_like, replace_submodule
from nbkit.rank.parallel.module.forward_wrapper import in_backward, marked
from nbkit.rank.parallel.parallelize import ShardedSkeleton, cut
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.proof.observe import tensors_in, watched
from nbkit.rank.parallel.tensor.sharded_tensor import ShardedTensor
from nbkit.rank.torch_private import FakeTensorMode, tree_leaves, tree_map_only
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.step.precision import Precision
from nbkit.rank.watching_mode import WatchingMode
from nbkit.strategy import Strategy


class LiveBytes(WatchingMode):
    """A dispatch mode that counts the bytes of live storages.

    now: bytes of all storages that operations inside have made and that still exist. beside: tensors that existed
    before; their bytes are in `now` too, unless counted=False. resized: check after each operation if the sizes of
    these storages have changed (zero 3). levels: `now` after each operation.
    """

    def __init__(self, beside: Iterable[Tensor] = (), *, counted: bool = True, resized: bool = False) -> None:
        super().__init__()
        self.now = 0
        self.levels: list[int] = []
        self._sizes: dict[int, int] = {}
        self._resized: dict[int, Any] | None = {} if resized else None
        for tensor in beside:
            self._see(tensor, counted=counted, there=True)

    @property
    def peak(self) -> int:
        """Return the largest `now` after any operation."""
        return max(self.levels, default=self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        for key, itself in list((self._resized or {}).items()):
            storage = itself()
            if storage is not None and storage.nbytes() != self._sizes[key]:
                self._changed(key, storage.nbytes() - self._sizes[key])
                self._sizes[key] = storage.nbytes()
        self.levels.append(self.now)
        return out

    def _see(self, tensor: Tensor, *, counted: bool = True, there: bool = False) -> None:
        if tensor.layout != torch.strided:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a tensor subclass without its own memory
            return
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if counted else 0
        self._sizes[key] = size
        self._changed(key, size)
        if there and counted and self._resized is not None:
            self._resized[key] = weakref.ref(storage)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _changed(self, key: int, size: int) -> None:
        """Note that a storage was allocated, resized or freed. size: the change in bytes."""
        self.now += size

    def _gone(self, key: int) -> None:
        self._changed(key, -self._sizes.pop(key))
        if self._resized is not None:
            self._resized.pop(key, None)


class LoneGroup:
    """Rank `rank` of a group of `ranks` ranks, without other processes. Only for shapes: values are not exchanged."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        """Return the number of ranks that the group pretends to have."""
        return self._ranks

    def rank(self) -> int:
        """Return the index of this rank in the group."""
        return self._rank

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Return None, so that torch does not wait for the operation."""

    allreduce = broadcast = _nothing
    _allgather_base = _reduce_scatter_base = all_gather_single = reduce_scatter_single = _nothing


def lone_connections(tp: int, cp: int) -> Connections:
    """Return the connections of one rank in a mesh with these degrees.

    It is the first rank of tp, and the last rank of cp, whose queries attend to the most keys.
    """
    groups: dict[str, Any] = {"dp": None, "pp": None, "shard": None, "replicate": None}
    groups |= {"tp": LoneGroup(tp) if tp > 1 else None, "cp": LoneGroup(cp, cp - 1) if cp > 1 else None}
    return Connections(Axes(Mesh(tp=tp, cp=cp), 0, 1, groups), None, (), {})


FEW = 2
"""Rows of the smaller of the two runs. Some models treat a single row as a special case."""


@dataclass(frozen=True)
class ModelTrace:
    """Measurements of a model on a rank, for some degrees of tp and cp.

    partial: names of the parameters whose gradients are summed over tp or cp. flops, touched: operations and bytes of
    one row's forward pass on this rank; see ForwardWork. costs: flops of each piece.
    """

    pieces: tuple[ModelPiece, ...]
    partial: frozenset[str]
    flops: float
    touched: float
    costs: tuple[float, ...]


def trace(
    facts: ModelFacts,
    options: JobOptions,
    config: TrainConfig,
    *,
    tp: int = 1,
    cp: int = 1,
    rows: int = FEW,
    real: bool = False,
) -> ModelTrace:
    """Measure the pieces of the model on a rank with these degrees. See `ModelFacts.block_names` for the pieces.

    config.hints.example: a batch, with any number of rows. rows: rows of the smaller run; the larger has twice as many.
    real: compute on the CPU with random weights. Raises errors of the model, and StrategyError if it cannot be split.
    """
    runs = []
    for count in (rows, 2 * rows):
        plan = ParallelPlan(Strategy(tp=tp, cp=cp), facts, replaced(options, compile=False, fp8=False))
        made = cut(plan, lone_connections(tp, cp), device=torch.device("cpu"))
        with nullcontext() if real else _without_memory():
            module = _filled(made, real=real)
            held = rows_of(config.hints.example)
            batch = pick(config.hints.example, [i % held for i in range(count)], rows=held)
            batch = tree_map_only(Tensor, lambda t: t.clone() if real else torch.empty_like(t), batch)
            runs.append(_Run(module, facts, options, config, batch, count))
    first, second = runs
    return ModelTrace(
        tuple(_piece(a, b, rows) for a, b in zip(first.segments, second.segments, strict=True)),
        frozenset(made.partial),
        (second.work.flops - first.work.flops) / rows,
        (second.work.touched - first.work.touched) / rows,
        tuple((b - a) / rows for a, b in zip(first.costs, second.costs, strict=True)),
    )


class _Segment:
    """Memory levels within a piece and at its ends, relative to the level at which its forward pass began."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.kept = self.carried = self.deferred = 0


class _Run:
    """A forward and backward pass of `module`, which cannot be used again."""

    def __init__(
        self, module: nn.Module, facts: ModelFacts, options: JobOptions, config: TrainConfig, batch: Any, rows: int
    ) -> None:
        names = facts.block_names[1:]
        self.segments = [_Segment() for _ in range(1 + len(names))]
        self.work = ForwardWork()
        params = list(module.parameters())
        value, target = pair(batch, config.inputs)
        with _without_cache(module):
            self._live = LiveBytes([*params, *module.buffers(), *tensors_in(batch)], counted=False)
            precision = Precision(config.precision, device=torch.device("cpu"), world_size=1)
            ends, starts, grads, worked = [0], [0], 0, [0.0]
            marks: dict[int, tuple[int, int]] = {}

            def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
                number = names.index(name) + 1
                if in_backward() or len(starts) != number:
                    return None  # recomputed, or called again: part of the current piece
                starts.append(len(self._live.levels))
                ends.append(self._live.now)
                worked.append(self.work.flops)
                given = [t for t in tensors_in((args, kwargs)) if t.requires_grad][:1]
                self.segments[number - 1].carried = sum(map(_bytes, given))
                return marked(args, kwargs, lambda: self._mark(marks, number, params))

            def leave(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                # The backward pass of recomputed blocks is not split.
                if not in_backward() and not options.recompute:
                    self.segments[len(starts) - 1].deferred += sum(
                        _bytes(t) for t in tensors_in(out) if t.requires_grad
                    )

            layers = [name for name, part in module.named_modules() if next(part.parameters(False), None) is not None]
            around = watched(module, enter, names=names), watched(module, leave=leave, names=layers)
            with around[0], around[1], self._live, self.work, precision.autocast():
                output = call(module, value)
                loss = weigh(config.loss(output, target), rows).value
                del output
            # Head and loss belong to the last block.
            self.costs = [b - a for a, b in pairwise([*worked, self.work.flops])]
            turn = len(self._live.levels)
            ends.append(self._live.now)
            starts.append(turn)
            with self._live:
                loss.backward()
        del loss
        levels = self._live.levels
        for number, segment in enumerate(self.segments):
            base = ends[number]
            segment.forward = [level - base for level in levels[starts[number] : starts[number + 1]]]
            segment.kept = ends[number + 1] - base
        start, grads = turn, 0
        for number in reversed(range(len(self.segments))):
            stop, made = marks.get(number, (len(levels), 0))
            own = [level - ends[number] - grads for level in levels[start:stop]]
            self.segments[number].backward = own or [self.segments[number].kept]
            start, grads = stop, made

    def _mark(self, marks: dict[int, tuple[int, int]], number: int, params: list[nn.Parameter]) -> None:
        """Note (operations so far, bytes of gradients so far) for a piece, only the first time."""
        made = sum(p.grad.nbytes for p in params if p.grad is not None)
        marks.setdefault(number, (len(self._live.levels), made))


def _bytes(tensor: Tensor | ShardedTensor) -> int:
    return (tensor.part if isinstance(tensor, ShardedTensor) else tensor).nbytes


def _piece(few: _Segment, many: _Segment, rows: int) -> ModelPiece:
    def line(a: float, b: float) -> PeakLine:
        return PeakLine.through((rows, a), (2 * rows, b))

    def peak(a: list[int], b: list[int]) -> tuple[PeakLine, ...]:
        # Compare operation by operation. If the two runs did different operations, compare their peaks.
        pairs = zip(a, b, strict=True) if len(a) == len(b) else [(max(a), max(b))]
        return upper(line(*two) for two in pairs)

    return ModelPiece(
        peak(few.forward, many.forward),
        line(few.kept, many.kept),
        peak(few.backward, many.backward),
        line(few.carried, many.carried),
        line(few.deferred, many.deferred),
    )


def _filled(made: ShardedSkeleton, *, real: bool) -> nn.Module:
    for name, places in homes(made.module).items():
        old = getattr(*places[0])
        memory = torch.empty(made.layouts[name].local, dtype=old.dtype)
        if real:
            nn.init.normal_(memory, std=0.02)
        replace_submodule(places, parameter_like(memory, old))
    return made.module.train()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Use tensors without memory inside. Silence torch's log of failures, because the caller gets an exception."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Disable the cache of keys and values inside. HF models need it only to generate."""
    configs = {id(c): c for part in module.modules() if getattr(c := getattr(part, "config", None), "use_cache", False)}
    for config in configs.values():
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True  # type: ignore[union-attr]


def updating(make: Any) -> Updating:
    """Return the temporary memory of an optimizer step. make: parameters -> an optimizer over them."""
    found = []
    for count in (2, 4):
        params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(count)]
        optimizer = make(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            beside = [*params, *(p.grad for p in params if p.grad is not None)]
            beside += [v for held in optimizer.state.values() for v in held.values() if isinstance(v, Tensor)]
            with LiveBytes(beside, counted=False) as live:
                optimizer.step()
        found.append((live.peak, params[0].nbytes))
    two, four = (peak / size for peak, size in found)
    every = max(four - two, 0.0) / 2
    return Updating(max(two - 2 * every, 0.0), every)
