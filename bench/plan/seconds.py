"""Compare predicted seconds of a step with measured ones, and the recommended strategy with the best one.

The prediction is made before the first step. A scenario is a model, a link and the memory of a device; each strategy is
a cell of it. Blocks sleep instead of computing, so that ranks that share cores take as long as they would alone. `tc
tbf` limits a link's rate (bench/rigs/tbf_links.py), and the link sleeps its latency. Without `tc` it sleeps for both
(bench/rigs/slept_link.py). nbkit measures the link before the first step, as always. The memory of a device is a share
of the measured peak of a rank under `ddp`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nbkit
from bench.pipeline.sleeping_rank import last
from bench.plan.peak import live_bytes, storages
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, data, token_loss
from bench.rigs.slept_link import Rate, SleptLink
from bench.rigs.tbf_links import TbfLinks
from nbkit.errors import NbkitError
from nbkit.planner.choose.search import fastest
from nbkit.planner.link_speed import ranks_of_node
from nbkit.rank.comm import link_probe
from nbkit.rank.data.batch import BatchSplit
from nbkit.rank.models.gpt import GPT, Block
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.peak_bytes import PeakBytes, largest
from nbkit.rank.train.estimate.time_model import seconds_before_a_step
from nbkit.strategy import Strategy

RANKS = 4
STRATEGIES = (
    "ddp",
    "zero1",
    "zero3",
    "tp",
    "dp=2 tp=2",
    "pp",
    "pp microbatches=16",
    "dp=2 pp=2",
    "tp=2 pp=2",
)
MEMORIES = (2.0, 0.8, 0.65, 0.5, 0.4)
BAR, SHARE = 0.03, 0.9
MEAN, WORST = 0.05, 0.12


@dataclass(frozen=True)
class Model:
    """A GPT and its batch. seconds: sleep of a block in the forward of a row; backward sleeps twice as long."""

    width: int
    layers: int
    batch: int
    seconds: float


# Under ddp a rank sleeps four seconds in a step, so the time that Python adds on a busy machine is small.
LARGE, SMALL = Model(256, 4, 16, 0.08), Model(128, 8, 16, 0.04)


@dataclass(frozen=True)
class Case:
    """A model and a link.

    latency: seconds of an operation. speed: bytes per second that leave a node. node: ranks on a node.
    """

    model: Model
    latency: float
    speed: float
    node: int = 1

    def __str__(self) -> str:
        model, link = self.model, f"{self.speed / 1e6:g} MB/s and {self.latency * 1e3:g} ms"
        nodes = f", from nodes of {self.node}" if self.node > 1 else ""
        return f"{model.layers} blocks of {model.width} over {link}{nodes}"


LINKS = (0.004, 200e6), (0.004, 25e6), (0.01, 6.25e6), (0.04, 6.25e6)
CASES = tuple(Case(model, *link) for model in (LARGE, SMALL) for link in LINKS)
NODES = (Case(LARGE, 0.004, 25e6, node=2),)


@dataclass(frozen=True)
class Cell:
    """A strategy's step: seconds, and bytes of the fullest rank at its peak. predicted: the same two figures."""

    seconds: float
    peak: int
    predicted: tuple[float, int]

    @property
    def error(self) -> float:
        """Return the relative error of the predicted seconds."""
        return self.predicted[0] / self.seconds - 1


@dataclass(frozen=True)
class Scenario:
    """A case on devices of `memory` bytes. cells: by strategy."""

    case: Case
    memory: float
    cells: dict[str, Cell]

    @property
    def chosen(self) -> str | None:
        """Return the strategy that the panel recommends: the fastest that is predicted to fit. None if none is."""
        return fastest({name: one.predicted[0] for name, one in self.cells.items() if one.predicted[1] <= self.memory})

    @property
    def fits(self) -> bool:
        """Return True if the recommended strategy fits in the memory, or if none is recommended."""
        return self.chosen is None or self.cells[self.chosen].peak <= self.memory

    @property
    def regret(self) -> float:
        """Return by what fraction the recommended strategy's step is longer than that of the best that fits.

        If none is recommended: 0 if none fits, infinite otherwise.
        """
        best = min((one.seconds for one in self.cells.values() if one.peak <= self.memory), default=float("inf"))
        if self.chosen is None:
            return 0.0 if best == float("inf") else float("inf")
        return max(self.cells[self.chosen].seconds / best - 1, 0.0)

    def __str__(self) -> str:
        wrong = "" if self.fits else ", WHICH DOES NOT FIT"
        return f"  {self.memory / 1e6:6.1f} MB: {self.chosen or 'nothing fits'}{wrong}, regret {self.regret:.1%}"


def run(
    folder: Path, cases: Sequence[Case] = CASES, strategies: Sequence[str] = STRATEGIES, *, slept: bool = False
) -> list[Scenario]:
    """Measure every scenario, print each as it comes, and return them. slept: do not try links by `tc tbf`."""
    found = []
    for model, node in dict.fromkeys((case.model, case.node) for case in cases):
        with ExitStack() as stack:
            links = None if slept else _links(stack, node)
            if links is None and node > 1:
                print("without tc tbf no link is one of a node", flush=True)
                continue
            place = links.enter if links is not None else None
            ranks = stack.enter_context(
                Ranks("plan.seconds", RANKS, folder=folder, place=place, **vars(model)),
            )
            for case in (case for case in cases if (case.model, case.node) == (model, node)):
                print(f"{case}, by {'tc tbf' if links is not None else 'sleeping'}", flush=True)
                at = _at(links, ranks, case)
                with at():
                    ranks.ask("link", latency=case.latency, speed=case.speed if links is None else inf)
                cells = dict(_cells(ranks, strategies, at))
                made = [Scenario(case, share * cells["ddp"].peak, cells) for share in MEMORIES]
                print(*made, sep="\n", flush=True)
                found += made
    return found


def _links(stack: ExitStack, node: int) -> TbfLinks | None:
    try:
        return stack.enter_context(TbfLinks(RANKS, node=node))
    except OSError as error:
        print(f"links sleep: {error}", flush=True)
        return None


_At = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the links have their rate."""


def _at(links: TbfLinks | None, ranks: Ranks, case: Case) -> _At:
    return (lambda: links.at(case.speed, ranks.pids)) if links is not None else nullcontext


def _cells(ranks: Ranks, strategies: Sequence[str], at: _At) -> Iterator[tuple[str, Cell]]:
    for strategy in strategies:
        said = ranks.ask("made", strategy=strategy)
        if "refused" in said[0]:
            print(f"  {strategy}: {said[0]['refused']}", flush=True)
            continue
        with at():
            took = max(ranks.ask("timed"))
        cell = Cell(took, max(one["peak"] for one in said), said[0]["predicted"])
        sizes = f"{cell.peak / 1e6:.2f} MB ({cell.predicted[1] / 1e6:.2f})"
        load = f"load {os.getloadavg()[0]:.0f}"
        print(f"  {strategy:20} {took:.3f} s ({cell.predicted[0]:.3f}, {cell.error:+.1%})  {sizes}  {load}", flush=True)
        yield strategy, cell


def bars(found: Sequence[Scenario]) -> tuple[bool, str]:
    """Return whether predictions and recommendations meet the bars, and a text with the figures."""
    cells = {(one.case, name): cell for one in found for name, cell in one.cells.items()}
    errors = {key: abs(cell.error) for key, cell in cells.items()}
    if not errors:
        return False, "nothing was measured"
    mean, worst = sum(errors.values()) / len(errors), max(errors, key=lambda key: errors[key])
    good, misfits = sum(one.regret <= BAR for one in found), sum(not one.fits for one in found)
    text = (
        f"{len(errors)} steps predicted: {mean:.1%} off on average (bar {MEAN:.0%}), {errors[worst]:.1%} at worst (bar "
        f"{WORST:.0%}: {worst[1]}, {worst[0]}); regret at most {BAR:.0%} in {good} of {len(found)} scenarios (bar "
        f"{SHARE:.0%}), {misfits} recommendations do not fit (bar 0)"
    )
    return mean <= MEAN and errors[worst] <= WORST and good >= SHARE * len(found) and not misfits, text


WARM, STEPS = 3, 4


class _Nap(torch.autograd.Function):
    """An identity that sleeps `seconds` for each row in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * x.shape[0]
        last(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        last(2 * ctx.seconds)
        return grad, None


class _Sleeping(Block):
    """A block that sleeps `seconds` for each row before it computes."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Nap.apply(x, self.seconds))  # type: ignore[no-untyped-call]


class Worker:
    """A rank with one job, which is switched from strategy to strategy."""

    def __init__(self, *, width: int, layers: int, batch: int, seconds: float) -> None:
        self._link, self._seconds, self._batch = SleptLink(), seconds, batch
        self._before = storages()
        of = config(width, layers, block=4)
        rows = data(of, batch)
        self._rows = tuple(torch.stack(part) for part in zip(*rows, strict=True))

        def make() -> nn.Module:
            model = GPT(of)
            for block in model.blocks:
                block.__class__ = _Sleeping
            return model

        _Sleeping.seconds = seconds
        self._job = nbkit.prepare(
            make,
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            loss=token_loss,
            strategy="ddp",
            hints=nbkit.ModelHints(example=tuple(part[:2] for part in self._rows)),
            log_dir=None,
        )
        # Measure what the blocks cost while they sleep.
        self._job.builder.finder.sync(Strategy.every(4, schedules=("1f1b",)))
        _Sleeping.seconds = 0.0
        self._rate: Rate | None = None
        self._peaks: PeakBytes | None = None

    def link(self, *, latency: float, speed: float) -> None:
        """Set the link for later steps and measure it. speed: bytes per second; inf if `tc tbf` limits it already."""
        self._rate = self._link.rate = Rate(latency, speed)
        link_probe.know(None)
        builder = self._job.builder
        builder.link = link_probe.link_of(self._job.device)
        self._link.rate = None
        # Predict as before a first step, when there is no optimizer state to count.
        self._model = CostModel(builder, builder.template.kinds(builder.skeleton), self._fits)
        self._peaks = PeakBytes(builder, self._model.census, real=True, before=self._peaks)

    def _fits(self, strategy: Strategy) -> BatchSplit:
        return BatchSplit.of(self._batch, strategy, microbatch_size=None)

    def made(self, *, strategy: str) -> dict[str, Any]:
        """Predict a step of `strategy`, switch to it, and count the bytes of this rank.

        peak: bytes of this rank. predicted: (seconds of a step, bytes of the fullest rank at its peak); the bytes are
        None on all ranks but rank 0. A strategy that is refused gives only `refused`: why.
        """
        job, link = self._job, self._job.builder.link
        assert self._peaks is not None and link is not None
        of = Strategy.parse(strategy, 4, node=ranks_of_node(link.node_of))
        try:
            asked = self._model.placed(of, now=job.strategy)
            predicted = seconds_before_a_step(self._model, job.builder, asked, self._batch)
            largest_peak = largest(self._peaks.of(asked, self._batch)) if job.rank == 0 else None
            job.switch(str(asked))
        except NbkitError as error:
            return {"refused": str(error).splitlines()[0]}
        counted = None
        for made, one in enumerate(job.batches([self._rows] * WARM), 1):
            # The first step allocates what later ones reuse. The second frees what the strategy before held. The third
            # is counted.
            if made == WARM:
                counted = live_bytes(job, self._before, self._rows)
            with counted or nullcontext():
                self._step(one)
        assert counted is not None
        return {
            "peak": counted.peak,
            "predicted": (predicted, largest_peak.total if largest_peak is not None else None),
        }

    def timed(self) -> float:
        """Return the seconds of a step: the least of several."""
        took = []
        for one in self._job.batches([self._rows] * STEPS):
            torch.distributed.barrier()  # all ranks begin together
            self._link.rate, _Sleeping.seconds = self._rate, self._seconds / self._job.strategy.tp
            began = time.perf_counter()
            self._step(one)
            took.append(time.perf_counter() - began)
            self._link.rate, _Sleeping.seconds = None, 0.0
        # The least, because load only adds to the sleeps. Not the first step: the weights that it gathers were sent
        # without a rate.
        return min(took[1:])

    def _step(self, batch: Any) -> None:
        self._job.backward(batch)
        with self._job.late_weights():  # as `fit` does
            self._job.optimizer.step()
        self._job.optimizer.zero_grad()
