"""Measure the seconds of `nbkit.check`, which proves a cut by running it, for a GPT of 10.9 million parameters.

Each check runs in its own process, on one thread, as on a rank. A check of a tiny model runs first, so that imports and
compilation are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from time import perf_counter, process_time

from bench.settings import Settings, shuffled
from bench.table import Row

STRATEGIES = ("ddp", "zero3", "dp=2 tp=2", "pp=2", "dp=2 pp=2", "cp=2")
ROUNDS = 5
BAR_S = 2.0


def run(settings: Settings) -> list[Row]:
    """Return one row for each strategy. It also shows CPU-seconds, because a busy machine makes wall seconds longer."""
    found: dict[str, list[tuple[float, float]]] = {strategy: [] for strategy in STRATEGIES}
    for order in shuffled(STRATEGIES, settings.count(ROUNDS)):
        for strategy in order:
            command = [sys.executable, "-m", "bench.proof_seconds", strategy]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            found[strategy].append(json.loads(said.splitlines()[-1]))
    rows = []
    for strategy, pairs in found.items():
        wall, cpu = median(wall for wall, _ in pairs), median(cpu for _, cpu in pairs)
        rows.append(
            Row(
                f"proof of a GPT of 10.9 M parameters, {strategy}",
                f"{wall:.2f} s",
                f"CPU-seconds {cpu:.2f}",
                "",
                "",
                f"≤ {BAR_S:g} s",
                wall <= BAR_S,
                {"wall": [wall for wall, _ in pairs], "cpu": [cpu for _, cpu in pairs]},
            )
        )
    return rows


def measured(strategy: str) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of one check. Raises RuntimeError if the strategy is refused."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    import nbkit

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def check(layers: int, width: int, block: int, rows: int) -> None:
        model = nbkit.GPT(nbkit.GPTConfig(block=block, layers=layers, width=width, heads=4))
        ids = torch.randint(0, 256, (rows, block + 1))
        world_size = None if "=" in strategy else 4
        found = nbkit.check(model, strategy, (ids[:, :-1], ids[:, 1:]), world_size, loss=loss)
        if not found.ok:
            raise RuntimeError(str(found))

    check(2, 32, 64, 16)
    wall, cpu = perf_counter(), process_time()
    check(6, 384, 256, 16)
    return perf_counter() - wall, process_time() - cpu


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
