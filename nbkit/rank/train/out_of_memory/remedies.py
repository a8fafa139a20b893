"""Find remedies for a training that ran out of memory: settings that use less memory for the same global batch.

The remedies: fewer rows in each forward pass, and more passes; recompute a part of each block in the backward pass, or
all of it; shard gradients, then also parameters, over the data axis; keep optimizer state in host memory; split layers
over all ranks. A remedy that does not fit alone is combined with fewer rows in each forward pass.

Seconds per step and peak bytes are computed as in the panel and in a plan. The remedy with the shortest step comes
first. Remedies without known seconds come last, in the order above, which is from commonly cheap to expensive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from nbkit.errors import NbkitError
from nbkit.planner.peak import Peak
from nbkit.rank.data.batch import BatchSplit
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.plan import make_plan
from nbkit.rank.train.estimate.cost_model import CostModel
from nbkit.rank.train.estimate.peak_bytes import PeakBytes, largest
from nbkit.rank.train.estimate.time_model import predicted_step
from nbkit.rank.train.job import Job
from nbkit.schedules import type_of
from nbkit.strategy import Strategy, divisors
from nbkit.trainer_options import RECOMPUTE

_LESS = 0.97
"""The room is at most this fraction of the predicted peak of the setting in force, because that did not fit."""

_SMALL = 64 << 20
"""A model with at most so many bytes of parameters is run on real tensors."""


@dataclass(frozen=True)
class Setting:
    """The settings that determine the memory of a step.

    microbatch_size: rows in each forward pass. Under pp it follows from the strategy.
    """

    strategy: Strategy
    microbatch_size: int
    recompute: bool | str = False
    offload: bool = False

    @classmethod
    def of(cls, job: Job, batch: int) -> Setting:
        """Return the setting in force."""
        micro = BatchSplit.of(batch, job.strategy, microbatch_size=job.config.compute.microbatch_size).micro
        return cls(job.strategy, micro, job.builder.options.recompute, job.builder.offload)

    def changes(self, before: Setting) -> str:
        """Return the changes from `before` in the user's notation: "zero3, microbatch_size=4"."""
        words = []
        if self.strategy != before.strategy:
            words.append(str(self.strategy))
        if self.strategy.pp == 1 and self.microbatch_size < before.microbatch_size:
            words.append(f"microbatch_size={self.microbatch_size}")
        words += [f"recompute={self.recompute!r}"] * (self.recompute != before.recompute)
        words += ["offload='cpu'"] * (self.offload and not before.offload)
        return ", ".join(words)


@dataclass(frozen=True)
class Remedy:
    """A setting that uses less memory.

    changes: see Setting. peak: predicted peak bytes of the fullest rank in a step. seconds: predicted seconds of a
    step. fits: True if the peak is at most the room. Each of the last three is None if unknown.
    """

    setting: Setting
    changes: str
    peak: int | None
    fits: bool | None
    seconds: float | None = None


@dataclass(frozen=True)
class Remedies:
    """All remedies that were found. rows: the remedies, the shortest step first.

    room: bytes that the fullest rank can hold. peak, seconds: predictions for the setting in force. None: unknown.
    """

    room: int | None
    peak: int | None
    rows: Sequence[Remedy]
    seconds: float | None = None

    @property
    def first(self) -> Remedy | None:
        """The first remedy that fits. If there is none, the first one that may fit."""
        ranked = sorted(self.rows, key=lambda row: not row.fits)
        return next((row for row in ranked if row.fits is not False), None)


def alternatives(job: Job) -> list[Strategy]:
    """Return strategies that may use less memory than the one in force."""
    now, world = job.strategy, job.world_size
    found = [replace(now, zero=zero, shard=0) for zero in (2, 3) if now.dp > 1 and now.zero < zero]
    return [*found, Strategy(tp=world)] if world > 1 and now.tp < world else found


def remedies(job: Job, batch: int, room: int | None, tried: Collection[Setting]) -> Remedies:
    """Return every setting that may use less memory than the one in force, except those in `tried`. Sends nothing.

    batch: rows of the global batch.
    """
    search = _Search(job, batch, room)
    found: dict[Setting, Remedy] = {}
    for wanted in search.wanted():
        row = search.row(wanted, tried)
        if row is not None and row.setting not in tried:
            found.setdefault(row.setting, row)
    # Round seconds to two digits. Among equal ones, the commonly cheaper remedy then comes first.
    rows = sorted(found.values(), key=lambda row: inf if row.seconds is None else float(f"{row.seconds:.2g}"))
    return Remedies(room, search.now_peak, tuple(rows), search.seconds(search.now))


class _Search:
    def __init__(self, job: Job, batch: int, room: int | None) -> None:
        self.job, self.batch, self.now = job, batch, Setting.of(job, batch)
        builder = job.builder
        # Use the optimizer state after a first step, which may not have been made yet.
        self._kinds = builder.template.kinds(builder.skeleton)
        model = CostModel(builder, self._kinds, job.feed.fits)
        self._models: dict[int, CostModel] = {}
        now = job.builder.options.recompute
        before = job.cost_model().peaks
        size = sum(p.nbytes for p in builder.skeleton.parameters())
        self._peaks = {
            again: PeakBytes(
                builder,
                model.census,
                real=size <= _SMALL,  # for a small model, a real run is cheaper than a run on shapes
                recompute=again,
                before=before if again == now else None,
            )
            for again in RECOMPUTE
        }
        self.now_peak = self.peak(self.now)
        self._room = room
        if room is not None and self.now_peak is not None:
            self._room = min(room, int(_LESS * self.now_peak))

    def peak(self, setting: Setting) -> int | None:
        """Return the peak bytes of the fullest rank in a step, or None if unknown. Raises StrategyError."""
        peaks = self._peaks[setting.recompute]
        top: Peak | None = largest(peaks.of(setting.strategy, self.batch, microbatch_size=setting.microbatch_size))
        if top is None:
            return None
        return top.total - top.optimizer * setting.offload

    def seconds(self, setting: Setting) -> float | None:
        """Return the seconds of a step, computed as in the panel; None if they cannot be predicted."""
        if setting.offload:
            return None  # the speed of transfers between device and host memory was not measured
        size = setting.microbatch_size
        if size not in self._models:

            def fits(strategy: Strategy) -> BatchSplit:
                return BatchSplit.of(self.batch, strategy, microbatch_size=None if strategy.pp > 1 else size)

            self._models[size] = CostModel(self.job.builder, self._kinds, fits, before=self.job.cost_model())
        return predicted_step(self.job, self._models[size], setting.strategy, recompute=setting.recompute)

    def wanted(self) -> Iterator[Setting]:
        """Yield each kind of remedy by itself. Where possible, keep the number of rows in a forward pass."""
        now = self.now
        yield now
        more = RECOMPUTE[RECOMPUTE.index(now.recompute) + 1 :] if self._can_recompute else ()
        for recompute in more:
            yield replace(now, recompute=recompute)
        strategy = now.strategy
        others = alternatives(self.job)
        for other in others:
            if other.zero:
                yield replace(now, strategy=other)
        if accelerator().holds(self.job.device) and not now.offload:
            yield replace(now, offload=True)
        for other in others:
            if not other.zero:
                yield replace(now, strategy=other, microbatch_size=self.batch)
        if strategy.dp > 1 and strategy.zero < 3:
            for recompute in more:
                yield replace(now, strategy=replace(strategy, zero=3, shard=0), recompute=recompute)

    @property
    def _can_recompute(self) -> bool:
        strategy, chain = self.now.strategy, self.job.builder.facts.chain
        if (
            self.job.builder.options.compile
            or (chain is not None and chain.recomputes)
            or (strategy.schedule is not None and type_of(strategy.schedule).splits)
            or strategy.ep > 1
        ):
            return False
        return bool(chain.units if chain is not None else structural_blocks(self.job.builder.skeleton))

    def row(self, wanted: Setting, tried: Collection[Setting]) -> Remedy | None:
        """Return `wanted` with the most rows in a forward pass that fit. None: it is refused.

        If no number of rows fits, return it with the most rows; for the setting in force, with the fewest.
        """
        found: list[Remedy] = []
        for setting in self._sizes(wanted):
            if setting in tried or not self._allowed(setting):
                continue
            try:
                peak = self.peak(setting)
            except NbkitError:
                return None
            fits = None if peak is None or self._room is None else peak <= self._room
            found.append(Remedy(setting, setting.changes(self.now), peak, fits, self.seconds(setting)))
            if fits is not False:
                return found[-1]
        if wanted == self.now:
            return found[-1] if found else None
        return found[0] if found else None

    def _sizes(self, wanted: Setting) -> Iterator[Setting]:
        """Yield `wanted` with a decreasing number of rows in a forward pass."""
        strategy, rows = wanted.strategy, self.batch // wanted.strategy.dp
        if self.batch % strategy.dp or strategy.speeds:
            return
        sizes = [size for size in reversed(divisors(rows)) if size <= wanted.microbatch_size]
        for size in sizes:
            if strategy.pp > 1:
                yield replace(wanted, strategy=replace(strategy, microbatches=rows // size), microbatch_size=size)
            elif wanted != self.now or size < wanted.microbatch_size:
                yield replace(wanted, microbatch_size=size)

    def _allowed(self, setting: Setting) -> bool:
        """Return True if this model and its optimizer can train under `setting`. See plan.refusals."""
        job, strategy = self.job, setting.strategy
        options = job.builder.options
        cut = options.cut or setting.microbatch_size < self.batch // strategy.dp
        try:
            make_plan(strategy, job.builder.facts, replace(options, cut=cut, recompute=setting.recompute))
            if strategy != job.strategy:
                job.builder.template.check(strategy)
        except NbkitError:
            return False
        return True


def described(found: Remedies, command: Any) -> list[str]:
    """Return the lines of the table of remedies. command: number of a remedy -> the command to type for it."""
    rows = [("", "setting", "a step", "peak of a rank", "fits", "to type")]
    rows.append(("", "as it is", _ms(found.seconds), _mb(found.peak), "no", ""))
    for number, row in enumerate(found.rows, 1):
        fits = "?" if row.fits is None else "yes" if row.fits else "no"
        rows.append((str(number), row.changes, _ms(row.seconds), _mb(row.peak), fits, command(number)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ms(seconds: float | None) -> str:
    return f"≈ {seconds * 1e3:.3g} ms" if seconds is not None else "not known"


def _mb(size: int | None) -> str:
    return f"{size / 1e6:,.4g} MB" if size is not None else "not known"
