"""Estimate the peak memory of a step on each rank of a job, under any strategy.

This calls nbkit.planner.peak with measurements of the model. A model is measured once for each pair (tp, cp); see
model_trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from nbkit.errors import NbkitError
from nbkit.mesh import levels_of
from nbkit.planner.link_speed import WorldLinks
from nbkit.planner.peak import ModelPiece, Peak, PeakLine, Updating, Weights, peak
from nbkit.planner.stages import place
from nbkit.rank.aside import NotAside
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.estimate.model_trace import ModelTrace, trace, updating
from nbkit.rank.train.estimate.state_bytes import StateBytes
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.strategy import Strategy

_LARGEST_REAL = 2 << 30
"""A model with more bytes of parameters is not run with real numbers."""


class ModelDescription(Protocol):
    """A model and an optimizer, as a Builder has them."""

    @property
    def skeleton(self) -> nn.Module: ...
    @property
    def facts(self) -> ModelFacts: ...
    @property
    def options(self) -> JobOptions: ...
    @property
    def config(self) -> TrainConfig: ...
    @property
    def template(self) -> OptimizerSpec: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def link(self) -> WorldLinks | None: ...


class PeakBytes:
    """Peak memory of a model and its optimizer.

    real: run the model with real numbers and random weights, unless it is very large. This draws random numbers, so do
    not use it in a thread during a training. It is exact where libraries behave differently on tensors without memory
    (as HF's attention does), and where shapes depend on values.
    """

    def __init__(
        self,
        builder: ModelDescription,
        census: StateBytes,
        *,
        real: bool = False,
        before: PeakBytes | None = None,
        recompute: bool | str | None = None,
    ) -> None:
        """before: an estimate of the same model, whose measurements are reused.

        recompute: recompute blocks in backward; default: as the job does.
        """
        self.builder, self.census, self.real, self.recompute = builder, census, real, recompute
        self.facts, self.options = builder.facts, builder.options
        alike = before is not None and before.facts.block_names == self.facts.block_names
        self._traced: dict[tuple[int, int], ModelTrace | None] = before._traced if before is not None and alike else {}
        self._updating: Updating | None = before._updating if before is not None else None

    def of(self, strategy: Strategy, batch: int, *, microbatch_size: int | None = None) -> list[Peak]:
        """Return the peak of the fullest rank at each place along pp; [] if the model could not be measured.

        batch: rows of the global batch. microbatch_size: rows of a forward pass; default: the job's setting. Raises
        StrategyError if the model cannot be split.
        """
        traced = self.traced(strategy.tp, strategy.cp)
        if traced is None or (strategy.pp > 1 and self.facts.chain is None):
            return []
        pieces = traced.pieces
        costs = self.facts.costs or (1.0,) * len(pieces)
        ranges = place(costs, strategy) if strategy.pp > 1 else [[(0, len(pieces))]]
        rows = max(stop - start for start, stop in strategy.rows(batch))
        size = microbatch_size or self.builder.config.compute.microbatch_size
        micros = min(strategy.microbatches or -(-rows // (size or rows)), rows)
        rest = self.census.at_rest(strategy)
        ranks: Sequence[int] = strategy.mesh.ranks("pp", 0)
        if self.options.whole or self.options.whole_in_tp:  # owners hold more than other ranks of their stage
            at = [strategy.mesh.index(rank)["pp"] for rank in range(strategy.mesh.size)]
            alike = [[rank for rank, place in enumerate(at) if place == at[one]] for one in ranks]
            ranks = tuple(max(some, key=lambda rank: rest[rank].total) for some in alike)
        again = self.builder.config.compute.recompute if self.recompute is None else self.recompute
        weights = [self.weights(strategy, own, traced.partial) for own in ranges]
        return [
            peak(
                strategy,
                number,
                pieces if again else _without_casts(pieces, weights[number]),
                weights[number],
                own,
                rest[rank],
                rows=-(-rows // micros),
                micros=micros,
                updating=self.updating,
                buffers=self._buffers(strategy, number),
                received=not accelerator().holds(self.builder.device),
                levels=self._levels(strategy, rank),
            )
            for number, (rank, own) in enumerate(zip(ranks, ranges, strict=True))
        ]

    def traced(self, tp: int, cp: int) -> ModelTrace | None:
        """Return the measurements for these degrees; None if the model did not run."""
        if (tp, cp) not in self._traced:
            builder, options = self.builder, self.options
            if self.recompute is not None:
                options = replace(options, recompute=self.recompute)
            found = None
            for real in (True, False) if self.real and self._size <= _LARGEST_REAL else (False,):
                try:
                    found = trace(self.facts, options, builder.config, tp=tp, cp=cp, real=real)
                except NbkitError:
                    raise
                except Exception:  # many models do not run on tensors without memory
                    continue
                break
            self._traced[tp, cp] = found
        return self._traced[tp, cp]

    def knows(self, tp: int, cp: int) -> bool:
        """Return True if the model was run for these degrees, even if it failed."""
        return (tp, cp) in self._traced

    def measure(self, axes: Collection[tuple[int, int]], aside: Callable[[Callable[[], Any]], Any]) -> bool:
        """Measure the model for pairs (tp, cp) of degrees. Return True if any was measured now.

        aside: Builder.aside.
        """
        wanted = [pair for pair in axes if not self.knows(*pair)]

        def run() -> dict[tuple[int, int], ModelTrace | None]:
            for pair in wanted:
                with suppress(NbkitError):  # a model that cannot be split has no peak
                    self.traced(*pair)
            return {pair: self._traced.get(pair) for pair in wanted}

        if wanted:
            with suppress(NotAside):
                self._traced.update(aside(run))
        return any(self._traced.get(pair) is not None for pair in wanted)

    @property
    def _size(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.builder.skeleton.parameters())

    @property
    def updating(self) -> Updating:
        """Return the temporary memory of a step of the job's optimizer."""
        if self._updating is None:
            self._updating = updating(lambda params: self.builder.template.over(params))
        return self._updating

    def _levels(self, strategy: Strategy, rank: int) -> int:
        """Return the number of ranks of a node that sum their gradients before the sum between nodes."""
        link = self.builder.link
        levels = levels_of(strategy.summed_group(rank), link.node_of) if link is not None else None
        return len(levels.within[0]) if levels is not None else 1

    def _buffers(self, strategy: Strategy, number: int) -> int:
        stages = self.facts.stages(strategy)
        here = dict(self.builder.skeleton.named_buffers())
        return sum(b.nbytes for name, b in here.items() if not stages or name in stages[number].buffers)

    def weights(self, strategy: Strategy, own: Sequence[tuple[int, int]], partial: Collection[str]) -> list[Weights]:
        """Return the weights of every piece, on the rank that runs the pieces of `own`.

        A tied weight belongs to the last piece that uses it.
        """
        skeleton, chain = self.builder.skeleton, self.facts.chain
        params = dict(skeleton.named_parameters())
        local = self.facts.parts(strategy.tp, 0, self.options.tp_plan)
        sizes = {name: local[name].numel * p.element_size() for name, p in params.items()}
        casts = self.facts.casts(strategy)
        less: dict[str, int] = {}
        if casts is not None:
            less = {name: sizes[name] - local[name].numel * casts.dtype.itemsize for name in casts.names}
        gathers = self.facts.gathers
        units = gathers.units if gathers is not None else chain.units if chain is not None else ()
        rooted = gathers.rooted if gathers is not None else ()
        blocks = self.facts.block_names
        count = len(blocks)
        here = [i for start, stop in own for i in range(start, stop)]
        if chain is not None:
            home = {name: i for i in here for name in chain.parameters[i]}
        else:
            home = _homes(list(params), blocks)
        found = []
        for i in range(count):
            names = [name for name in params if home.get(name) == i]
            inside = [n for n in names if n not in rooted and any(n.startswith(f"{unit}.") for unit in units)]
            outside = [n for n in names if n not in set(inside)]
            less_inside, less_outside = (sum(less.get(n, 0) for n in some) for some in (inside, outside))
            found.append(
                Weights(
                    tuple(sizes[n] for n in inside),
                    tuple(sizes[n] for n in outside),
                    sum(sizes[n] for n in names if n in partial),
                    less_inside,
                    less_outside,
                )
            )
        return found


def _without_casts(pieces: Sequence[ModelPiece], weights: Sequence[Weights]) -> list[ModelPiece]:
    """Return `pieces` without the casts of weights that are cast before they are gathered.

    Such weights are not cast again in a piece, so it keeps no cast. The size of the cast is subtracted.
    """
    found = []
    for piece, own in zip(pieces, weights, strict=True):
        cast = PeakLine(own.less_inside + own.less_outside)
        found.append(replace(piece, forward=tuple(line - cast for line in piece.forward), kept=piece.kept - cast))
    return found


def _homes(names: Sequence[str], blocks: Sequence[str]) -> dict[str, int]:
    """Return name of a parameter -> index of its piece.

    It is the piece of its block. A parameter outside of the blocks belongs to the first piece if it is declared before
    them, otherwise to the last.
    """
    within = {name: i for name in names for i, block in enumerate(blocks) if name.startswith(f"{block}.")}
    first = min((names.index(name) for name in within), default=0)
    return {n: within.get(n, 0 if at <= first else len(blocks) - 1) for at, n in enumerate(names)}


def largest(peaks: Sequence[Peak]) -> Peak | None:
    """Return the peak of the fullest stage; None if there is none."""
    return max(peaks, key=lambda one: one.total, default=None)
