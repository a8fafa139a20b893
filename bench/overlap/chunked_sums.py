"""Measure a step under `tp=2 tp_chunks=4` and under `tp=2`. Links and matrix products sleep."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.pipeline.sleeping_rank import last
from bench.rigs.forked import Ranks
from bench.rigs.jobs import config, trainer
from bench.rigs.slept_link import Rate, SleptLink
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row

STEPS, BATCH, CHUNKS = 10, 8, 4
SIZE = {"width": 64, "layers": 4, "block": 64}
COMPUTE_S, LATENCY_S = 2.0, 0.0002
SHARES = (0.5, 1.0)
"""The time in which a link carries what tp sends in a step, relative to the time of all products."""


def run(settings: Settings) -> list[Row]:
    """Return one row for each speed of the link."""
    with Ranks("overlap.chunked_sums", 2, folder=settings.folder, **SIZE) as ranks:
        return [_row(ranks, share, settings.count(STEPS)) for share in SHARES]


def _row(ranks: Ranks, share: float, pairs: int) -> Row:
    ranks.ask("begin", share=share)
    chunked, plain = [], []
    for number in range(pairs):
        for chunks in (1, CHUNKS) if number % 2 else (CHUNKS, 1):
            seconds = max(ranks.ask("step", chunks=chunks))
            (plain if chunks == 1 else chunked).append(seconds)
    figure = ratio(chunked, plain)
    return Row(
        f"tp=2 tp_chunks={CHUNKS}, {COMPUTE_S:g} s of products in a step, a link that carries the bytes of a "
        f"step in {share:g} x this time: step",
        f"{1e3 * statistics.median(chunked):.0f} ms",
        f"tp=2 {1e3 * statistics.median(plain):.0f} ms",
        f"{figure.middle:.3f} [{figure.low:.3f}, {figure.high:.3f}]",
        "",
        "< 1",
        figure.high < 1,
        {"nbkit": chunked, "tp=2": plain},
    )


class _Sleeping(TorchDispatchMode):
    """Sleeps in each matrix product, for a time proportional to its operations, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds_each = self.counted = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            one, other = args[-2:]
            self.counted += (size := 2 * one.numel() * other.shape[-1])
            last(size * self.seconds_each)
        return func(*args, **(kwargs or {}))


class Worker:
    """A rank that trains the same GPT with and without chunks."""

    def __init__(self, *, width: int, layers: int, block: int) -> None:
        torch.set_num_threads(1)
        self._link, self._products, model = SleptLink(), _Sleeping(), config(width, layers, block=block)
        self._trainers = {
            chunks: trainer(model, f"tp=2 tp_chunks={chunks}" if chunks > 1 else "tp=2", batch=BATCH)
            for chunks in (1, CHUNKS)
        }
        for each in self._trainers.values():
            each.fit(2)
        self._link.rate = Rate(0.0, math.inf)
        before = self._link.carried
        self.step(chunks=1)
        self._bytes, self._products.seconds_each = self._link.carried - before, COMPUTE_S / self._products.counted

    def begin(self, *, share: float) -> None:
        """Set the speed of the link."""
        self._link.rate = Rate(LATENCY_S, self._bytes / (share * COMPUTE_S))

    def step(self, *, chunks: int) -> float:
        """Return the seconds of a step."""
        began = time.perf_counter()
        with self._products:
            self._trainers[chunks].fit(1)
        return time.perf_counter() - began
