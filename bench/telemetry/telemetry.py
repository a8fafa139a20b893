"""Measure what telemetry costs a step, compared with the same step without counting and records.

There are two costs: that of counting calls and bytes, and that of everything that is on by default: also times, phases,
records on disk and TensorBoard's scalars.

One job trains all arms, in alternating blocks. A block has as many steps as there are between two steps that
listen for the ends of collectives. The cost comes from the calls in a step and from the step itself, not from what it
computes. So the ratio holds for a step of about a quarter of a second, which is short for a model that needs several
ranks. The note says how many milliseconds the cost is, which is the same for shorter and longer steps. It also says how
long a rank was busy with noting calls, by its own clock. This is the whole cost of counting, without the noise of the
ratio.
"""

from __future__ import annotations

import torch.distributed as dist

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.settings import Settings, shuffled
from bench.stats import quantile, ratio
from bench.steps.steps import Paced
from bench.table import Row, compared
from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.sinks import ProgressLine
from nbkit.rank.train.run_recorder import Recorder
from nbkit.records.records import LISTEN_EVERY

RANKS = 2
STRATEGIES = ("ddp", "zero3", "tp", "pp")
SIZE = {"width": 256, "layers": 4, "block": 64, "batch": 24}
ROUNDS, STEPS = 30, LISTEN_EVERY
BARS = {"count": 1.01, "time": 1.02}
WORDS = {"count": "collectives counted", "time": "collectives timed, records and scalars on disk"}


def run(settings: Settings) -> list[Row]:
    """Return two rows for each strategy."""
    rows = []
    with Ranks("telemetry.telemetry", RANKS, folder=settings.folder, **SIZE) as ranks:
        arms = {"off": "off", "off again": "off", "count": "count", "time": "time"}
        for strategy in STRATEGIES:
            ranks.ask("prepare", strategy=strategy)
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            cpu: dict[str, list[float]] = {arm: [] for arm in arms}
            own: dict[str, list[float]] = {arm: [] for arm in arms}
            for order in shuffled(list(arms), settings.count(ROUNDS)):
                for arm in order:
                    blocks = ranks.ask("block", mode=arms[arm], steps=STEPS)
                    seconds[arm].append(max(wall for wall, _, _ in blocks))
                    cpu[arm].append(sum(spent for _, spent, _ in blocks))
                    own[arm].append(max(noting for _, _, noting in blocks))
            without, spent_without = _means(seconds), _means(cpu)
            for mode, bar in BARS.items():
                what = f"step, {strategy}, {RANKS} ranks, {WORDS[mode]} / no telemetry"
                again = [a / b * c for a, b, c in zip(seconds["off again"], seconds["off"], seconds[mode], strict=True)]
                more = quantile([(a - b) * 1e3 for a, b in zip(seconds[mode], without, strict=True)])
                spent = ratio(cpu[mode], spent_without)
                note = (
                    f"; {more.middle:+.2f} ms a step [{more.low:+.2f}, {more.high:+.2f}]"
                    f"; noting calls {quantile(own[mode]).middle * 1e3:.2g} ms"
                    f"; CPU-seconds of the ranks {spent.middle:.3f} x [{spent.low:.3f}, {spent.high:.3f}]"
                )
                rows.append(compared(what, seconds[mode], "without", without, again, bar, "ms", note=note))
    return rows


def _means(of: dict[str, list[float]]) -> list[float]:
    """Return the mean of both arms without telemetry, round by round, which has less noise than either."""
    return [(a + b) / 2 for a, b in zip(of["off"], of["off again"], strict=True)]


class Worker:
    """A rank with one job for all arms, in the same memory. The recorder of the run is removed and put back."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        self._config, self._batch, self._pace = config(width, layers, block=block), batch, Paced()

    def prepare(self, strategy: str) -> None:
        """Make a training of `strategy` for the next blocks, and warm it up."""
        self._trainer = trainer(
            self._config, strategy, batch=self._batch, loading=nbkit.Loading(collate=self._pace), log_dir="runs"
        )
        self._trainer.fit(3)
        job = self._trainer.job
        others = [one for one in job.ledger.bus.sinks if isinstance(one, ProgressLine)]
        self._recording = {True: (job.recorder, [*job.ledger.bus.sinks]), False: (Recorder(job.device), others)}

    def block(self, mode: str, steps: int) -> tuple[float, float, float]:
        """Train `steps` steps and return the mean (seconds, CPU-seconds, seconds of noting calls) of one.

        mode: "off", "count", or "time", which includes all that a run records of itself.
        """
        collectives.set_mode(mode)
        job = self._trainer.job
        job.recorder, job.ledger.bus.sinks = self._recording[mode == "time"]
        dist.barrier()
        self._pace.restart()
        before = collectives.own_ns()
        self._trainer.fit(steps + 1)
        own = (collectives.own_ns() - before) / (steps + 1) / 1e9
        collectives.set_mode("time")
        return self._pace.seconds, self._pace.cpu_seconds, own
