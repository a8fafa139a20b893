"""A part of chaos.py: a training whose ranks are killed again and again, compared with one without kills."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.chaos_bench import EQUAL, RUN_SECONDS, Bench, Wrong

GOODPUT = ("zero3", "ddp")
BAR = 0.94
PACED_STEPS = 20
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

SETUP = """
asleep = 0.0  # seconds of a step, a third of them forward: ranks that share cores do not wait for each other's compute

class Computing(Passing):
    def forward(self, x):
        time.sleep(asleep / 3 / LAYERS)
        out = super().forward(x)
        if out.requires_grad and asleep:
            out.register_hook(lambda grad: time.sleep(asleep * 2 / 3 / LAYERS))
        return out

def computing():
    made = model(layers=LAYERS)
    for block in made.blocks:
        block.__class__ = Computing
    return made
"""


@dataclass(frozen=True)
class Kill:
    """A kill of one rank. when: seconds after the training has begun."""

    when: float
    rank: int
    number: int


def drawn(seconds: float, every: float, ranks: int, seed: int) -> list[Kill]:
    """Draw one kill in each span of `every` seconds, not near its edges: moment, rank and signal are random."""
    draw = random.Random(seed)
    return [
        Kill((span + draw.uniform(0.1, 0.9)) * every, draw.randrange(ranks), draw.choice(SIGNALS))
        for span in range(int(seconds / every))
    ]


def goodput(
    bench: Bench, minutes: float, every: float, strategies: Sequence[str] = GOODPUT, seed: int = 0, compute: float = 0.3
) -> list[str]:
    """Print the steps per second of both trainings. All strategies together take `minutes`. Return what went wrong.

    every: seconds from one kill to the next. compute: seconds of a step, slept.
    """
    wrong = []
    bench.cluster.run(f"LAYERS = 4\n{SETUP}", timeout=RUN_SECONDS)
    for strategy in strategies:
        try:
            _compared(bench, strategy, minutes * 60 / len(strategies), every, seed, compute)
        except Exception as error:
            wrong.append(f"goodput, {strategy}: {type(error).__name__}: {error}")
            bench.end()
            bench.cluster.run(f"LAYERS = 4\n{SETUP}", timeout=RUN_SECONDS)
    return wrong


def _compared(bench: Bench, strategy: str, seconds: float, every: float, seed: int, compute: float) -> None:
    known = set(bench.cluster.connection.replaced)
    paced, _, _ = _trained(bench, strategy, compute, PACED_STEPS, [])
    steps = max(round(seconds / paced * PACED_STEPS), PACED_STEPS)
    alone, losses, _ = _trained(bench, strategy, compute, steps, [])
    disturbed, found, kills = _trained(bench, strategy, compute, steps, drawn(seconds, every, bench.n, seed))
    apart = max(abs(one - other) for each in found for one, other in zip(each, losses[0], strict=True))
    if apart > EQUAL:
        raise Wrong(f"losses differ by {apart:.2g}")
    said = [said for key, (_, said) in bench.cluster.connection.replaced.items() if key not in known]
    if len(said) != kills:
        raise Wrong(f"{kills} kills, and {len(said)} replacements: {said}")
    for one in said:
        print(f"  {one}")
    print(
        f"goodput, {strategy}: {steps} steps in {alone:.0f} s alone and in {disturbed:.0f} s with {kills} kills, "
        f"one every {every:.0f} s: {alone / disturbed:.1%} (bar {BAR:.0%}), a step {alone / steps:.3f} s, "
        f"losses equal to {apart:.1g}; load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


def _trained(
    bench: Bench, strategy: str, compute: float, steps: int, kills: list[Kill]
) -> tuple[float, list[list[float]], int]:
    """Return (seconds of the training, losses by rank, number of kills before its end)."""
    cluster, over, made = bench.cluster, threading.Event(), list[Kill]()
    cluster.run(f"asleep = 0.0\ntrainer = make({strategy!r}, model=computing, callbacks=[])", timeout=RUN_SECONDS)
    cluster.run(f"asleep = {compute}")
    began = time.monotonic()

    def kill() -> None:
        for each in kills:
            if over.wait(max(began + each.when - time.monotonic(), 0.0)):
                return
            cluster.entry.ranks[each.rank].end(each.number)
            made.append(each)

    handle: Any = cluster.run(f"trainer.fit({steps}); found = losses()", detach=True)
    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    try:
        handle.wait(timeout=steps * compute * 10 + RUN_SECONDS)
        took = time.monotonic() - began
    finally:
        over.set()
        killing.join()
    values: list[list[float]] = cluster.pull("found", None)
    if any(len(found) != steps for found in values):
        raise Wrong(f"steps of {steps}, by rank: {[len(found) for found in values]}")
    return took, values, len(made)
