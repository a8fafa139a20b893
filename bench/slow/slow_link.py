"""Levers of the data axis over a link of 100 Mbit: bytes beside their formula, seconds, and the loss after 300 steps.

The link is the loopback interface of a private network namespace with `tc tbf` on it, at twice the rate: both
directions go over it. Where that is not possible the seconds are left out. The loss is of held-out text, of a GPT that
begins with the same weights and sees the same rows under every strategy.
"""

from __future__ import annotations

import shutil
import subprocess

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row, skipped
from nbkit.strategy import Strategy

RANKS = 2
LEVERS = ("compress=bf16", "compress=int8", "sync_every=8")
STEPS, QUICK_STEPS = 300, 40
MBIT = 100
BYTES, LOSS = 1.03, 0.01
SIZE = {"width": 128, "layers": 2, "block": 64, "batch": 16}


def run(settings: Settings) -> list[Row]:
    """A row for each lever, beside plain ddp."""
    if not settings.isolated:
        return [skipped("levers over a slow link", "ddp", "no private network namespace here")]
    steps = QUICK_STEPS if settings.quick else STEPS
    with Ranks("slow.slow_link_ranks", RANKS, folder=settings.folder, **SIZE) as ranks:
        names = ["ddp", *(f"ddp {lever}" for lever in LEVERS)]
        loss = {name: ranks.ask("loss", strategy=name, steps=steps)[0] for name in names}
        wire = {name: ranks.ask("wire", strategy=name)[0] for name in names}
        limited = _limit(2 * MBIT)
        seconds = {
            name: [ranks.ask("seconds", strategy=name)[0] for _ in range(settings.count(3))] if limited else []
            for name in names
        }
    return [_row(name, steps, loss, wire, seconds) for name in names[1:]]


def _row(
    name: str, steps: int, loss: dict[str, float], wire: dict[str, tuple[float, float]], seconds: dict[str, list[float]]
) -> Row:
    # Of the exact bytes: an int8 has 4 more for each 512 elements, which the bar is for.
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


def _limit(mbit: int) -> bool:
    """Whether the loopback interface has this rate now."""
    if shutil.which("tc") is None:
        return False
    rate = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms"]
    command = ["tc", "qdisc", "add", "dev", "lo", "root", *rate]
    return subprocess.run(command, capture_output=True).returncode == 0
