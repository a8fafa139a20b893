"""Two parts of chaos.py: what a death costs in each strategy, and two deaths at once."""

from __future__ import annotations

import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nbkit import Cluster
from tests.support.chaos_bench import EQUAL, RUN_SECONDS, STRATEGIES, Bench, Wrong

LARGE = "model=lambda: model(layers=8, width=324)"  # 10 million parameters
LARGE_STEPS, KILLED_AFTER = 9, 4
_SAID = re.compile(r"replaced: (\d+) steps? and ([\d.]+) s lost")


def kill(bench: Bench, rounds: int, strategies: Sequence[str] = STRATEGIES) -> list[str]:
    """Print the seconds from a kill to the first step after it, by strategy. Return what went wrong."""
    wrong: list[str] = []
    alone: list[float] = []
    for strategy in strategies:
        rows: list[tuple[float, ...]] = []
        for number in range(rounds):
            rank = 1 + number % (bench.n - 1)
            try:
                if not alone:
                    alone = _fitted(bench, "ddp", None)[0]
                losses, row = _fitted(bench, strategy, rank)
                if not _equal(losses, alone):
                    raise Wrong(f"the curve is another one: {losses} {alone}")
            except Exception as error:
                wrong.append(f"kill of rank {rank}, {strategy}: {type(error).__name__}: {error}")
                print(wrong[-1], flush=True)
                bench.end()
                continue
            rows.append(row)
        if rows:
            total, boundary, step, old, new, again = (statistics.median(each) for each in zip(*rows, strict=True))
            print(
                f"kill, {strategy}, {len(rows)} times: {total:.2f} s to the first step after it, {boundary:.2f} of "
                f"them to the boundary; a step {step:.2f} s; CPU-seconds of a survivor {old:.2f}, of the new rank "
                f"{new:.2f}; steps made again {again:.0f}; load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
    return wrong


def _fitted(bench: Bench, strategy: str, rank: int | None) -> tuple[list[float], tuple[float, ...]]:
    """Return the losses of a training, and the cost of a kill of `rank` in it."""
    cluster = bench.cluster
    cluster.run(f"stamps = []\ntrainer = make({strategy!r}, {LARGE}, callbacks=[])", timeout=RUN_SECONDS)
    known = set(cluster.connection.replaced)
    handle = cluster.run(f"trainer.fit({LARGE_STEPS})\nlosses(), stamps", detach=True)
    moment = time.time()
    if rank is not None:
        bench.reach(KILLED_AFTER)
        moment = time.time()
        os.kill(cluster.entry.ranks[rank].pid, signal.SIGKILL)
    values = handle.wait(timeout=RUN_SECONDS).values
    losses, stamps = values[0]
    if rank is None:
        return losses, ()
    if not all(_equal(losses, found) for found, *_ in values.values()):
        raise Wrong("the ranks do not have the same history")
    said = " ".join(said for key, (_, said) in cluster.connection.replaced.items() if key not in known)
    told = _SAID.search(said)
    if told is None:
        raise Wrong(f"nothing was said of a replacement: {said!r}")
    boundary = float(told[2])
    first = next(stamp for stamp in stamps if stamp[1] > moment + boundary - 0.05)
    before = next(stamp for stamp in reversed(stamps) if stamp[1] < first[1])
    pace = statistics.median(b[1] - a[1] for a, b in pairwise(stamps) if b[0] == a[0] + 1 and b is not first)
    fresh = values[rank][1][0][2]
    return losses, (first[1] - moment, boundary, pace, first[2] - before[2], fresh, float(told[1]))


def _equal(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= EQUAL for a, b in zip(one, other, strict=True))


def pairs(sizes: tuple[int, ...]) -> list[str]:
    """Kill two ranks at once under zero3, first two that are not buddies, then buddies. Return what went wrong."""
    wrong = []
    for n in sizes:
        for together in (False, True):
            bench = Bench(n)
            ranks = (1, 1 + n // 2) if together else (1, 2)
            try:
                print(f"pairs, {n} ranks, {ranks}: {_pair(bench, ranks, together)}", flush=True)
            except Exception as error:
                wrong.append(f"pairs, {n} ranks, {ranks}: {type(error).__name__}: {error}")
            bench.end()
    return wrong


def _pair(bench: Bench, ranks: tuple[int, int], together: bool) -> str:
    folder = os.path.join(os.environ["NBKIT_HOME"], "saved")
    cluster: Cluster = bench.cluster
    cluster.run(f"trainer = make('zero3', {folder!r})", timeout=RUN_SECONDS)
    handle = cluster.run("trainer.fit(24)\nlosses()", detach=True)
    bench.reach(12)
    pids = [cluster.entry.ranks[rank].pid for rank in ranks]
    for pid in pids:
        threading.Thread(target=os.kill, args=(pid, signal.SIGKILL)).start()
    results: Any = handle.wait(timeout=RUN_SECONDS)
    bench.check(results.values)
    said = "all ranks continue from the checkpoint" in "".join(results.output.values())
    if said != together:
        raise Wrong("gone on from a checkpoint" if said else "nothing was said of the checkpoint")
    return "equal, from the checkpoint, and says so" if together else "equal, from the backups"
