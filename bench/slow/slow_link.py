"""Measure `compress=` and `sync_every=` over a link of 100 Mbit: bytes, seconds, and the loss after 300 steps.

The link is the loopback interface of a private network namespace. `tc tbf` limits it to twice the rate, because both
directions share it. Where that is not possible, the seconds are left out. The loss is that of held-out text. Under
every strategy the GPT begins with the same weights and sees the same rows.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.settings import Settings
from bench.stats import quantile
from bench.steps.wire import trained
from bench.table import Row, skipped
from nbkit.rank.models.text import TextDataset
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy

RANKS = 2
LEVERS = ("compress=bf16", "compress=int8", "sync_every=8")
STEPS, QUICK_STEPS = 300, 40
MBIT = 100
BYTES, LOSS = 1.03, 0.01
SIZE = {"width": 128, "layers": 2, "block": 64, "batch": 16}


def run(settings: Settings) -> list[Row]:
    """Return one row for each option, compared with plain ddp."""
    if not settings.isolated:
        return [skipped("levers over a slow link", "ddp", "no private network namespace here")]
    steps = QUICK_STEPS if settings.quick else STEPS
    with Ranks("slow.slow_link", RANKS, folder=settings.folder, **SIZE) as ranks:
        names = ["ddp", *(f"ddp {lever}" for lever in LEVERS)]
        loss = {name: ranks.ask("loss", strategy=name, steps=steps)[0] for name in names}
        wire = {name: ranks.ask("wire", strategy=name)[0] for name in names}
        with limited(2 * MBIT) as slow:
            seconds = {
                name: [ranks.ask("seconds", strategy=name)[0] for _ in range(settings.count(3))] if slow else []
                for name in names
            }
    return [_row(name, steps, loss, wire, seconds) for name in names[1:]]


def _row(
    name: str, steps: int, loss: dict[str, float], wire: dict[str, tuple[float, float]], seconds: dict[str, list[float]]
) -> Row:
    # The share of ddp's bytes. int8 sends 4 bytes more for each 512 elements, which the bar allows.
    settings = Strategy.parse(name, RANKS).settings
    share = {"": 1.0, "bf16": 1 / 2, "int8": 1 / 4}[settings.get("compress", "")] / settings.get("sync_every", 1)
    ratio, recorded = wire[name][0] / wire["ddp"][0], wire[name][1] / wire["ddp"][1]
    off = abs(loss[name] / loss["ddp"] - 1)
    took = ""
    if seconds[name]:
        ours, theirs = (quantile(seconds[each]).middle for each in (name, "ddp"))
        took = f"; a step over {MBIT} Mbit {1e3 * ours:.0f} ms, ddp {1e3 * theirs:.0f} ms"
    return Row(
        f"{name.removeprefix('ddp ')}, {RANKS} ranks, {wire['ddp'][1] / 1e6:.1f} MB a step of ddp",
        f"{ratio:.4f} of its bytes on the wire, {recorded:.4f} recorded{took}; "
        f"loss after {steps} steps {loss[name]:.4f}, off {off:.2%}",
        f"ddp, loss {loss['ddp']:.4f}",
        f"{recorded / share:.4f}",
        "",
        f"≤ {BYTES:g} x {share:g} of the bytes; loss within {LOSS:.0%}",
        recorded <= BYTES * share and off <= LOSS,
        {"seconds": seconds[name], "ddp seconds": seconds["ddp"], "loss": [loss[name], loss["ddp"]]},
    )


@contextmanager
def limited(mbit: int) -> Iterator[bool]:
    """Limit the loopback interface to `mbit` Mbit per second inside. Yield False where that is not possible."""
    queue = ["dev", "lo", "root"]
    rate = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms"]
    command = ["tc", "qdisc", "add", *queue, *rate]
    if shutil.which("tc") is None or subprocess.run(command, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["tc", "qdisc", "del", *queue], capture_output=True)


PERIOD = 8
"""Steps that are measured together. With sync_every=8, one average is among them."""


class Worker:
    """A rank that keeps nothing from one strategy to the next."""

    def __init__(self, *, width: int, layers: int, block: int, batch: int) -> None:
        collectives.set_mode("count")
        warnings.simplefilter("ignore")  # these strategies do not equal one process, which is what is measured
        self._config, self._batch = config(width, layers, block=block), batch
        self._data = TextDataset(block=block, limit=2_000_000)
        self._heldout = TextDataset(block=block, limit=2_000_000, split="heldout")

    @contextmanager
    def _trainer(self, strategy: str, *, seed: int = 0) -> Iterator[Trainer]:
        made = trainer(self._config, strategy, batch=self._batch, data=self._data, seed=seed)
        yield made
        made.job.sharded_model.data.close()
        del made
        gc.collect()

    def loss(self, *, strategy: str, steps: int, seed: int = 0) -> float:
        """Return the loss on held-out text after `steps` steps. seed: of the weights and of the order of the rows."""
        with self._trainer(strategy, seed=seed) as made:
            made.fit(steps)
            return made.evaluate([self._heldout[i] for i in range(0, len(self._heldout), 8)], batch_size=64)

    def wire(self, *, strategy: str) -> tuple[float, float]:
        """Return the bytes of a step: (of all ranks on the wire, of this rank as telemetry recorded them)."""
        with self._trainer(strategy) as made:
            made.fit(PERIOD)
            one, three = trained(made, PERIOD), trained(made, 3 * PERIOD)
        both: list[Any] = [(sum(run["recorded"].values()), run["wire"]) for run in (one, three)]
        recorded, wire = ((more - fewer) / (2 * PERIOD) for fewer, more in zip(*both, strict=True))
        return wire, recorded

    def seconds(self, *, strategy: str) -> float:
        """Return the seconds of a step."""
        with self._trainer(strategy) as made:
            made.fit(1)
            began = time.perf_counter()
            made.fit(PERIOD)
            return (time.perf_counter() - began) / PERIOD
