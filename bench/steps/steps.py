"""A training step under each strategy, nbkit's beside that of a plain script that uses torch's own pieces.

Both jobs stand side by side, each with its own ranks; one waits for its orders while the other trains. The model, the
batches and the optimizer are the same; nbkit has what it has by default, records of the run included.
"""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.settings import Settings, shuffled
from bench.table import Row, compared

PIECES = {
    "ddp": "DistributedDataParallel",
    "zero1": "DDP, ZeroRedundancyOptimizer",
    "zero2": "fully_shard, not resharded after forward",
    "zero3": "fully_shard",
    "hsdp shard=2": "fully_shard on a 2 x 2 mesh",
    "tp": "parallelize_module, loss_parallel",
    "pp": "PipelineStage, Schedule1F1B",
    "dp=2 tp=2": "parallelize_module, replicate",
    "dp=2 pp=2": "PipelineStage, Schedule1F1B, replicate",
}
STRATEGIES = {2: ("ddp", "zero1", "zero2", "zero3", "tp", "pp"), 4: ("hsdp shard=2", "dp=2 tp=2", "dp=2 pp=2")}
SIZE = {"width": 256, "layers": 4, "block": 64, "batch": 8}
QUICK = {"width": 64, "layers": 4, "block": 32, "batch": 8}
MICROBATCHES = 4
ROUNDS = 20
STEPS = 6
"""Of a block. Each begins a run, whose second step counts memory: 1.5 ms, else in every hundredth step only."""
BAR = 1.02


def run(settings: Settings) -> list[Row]:
    """A row for each strategy, on 2 ranks or, where it needs them, on 4."""
    rows = []
    size = QUICK if settings.quick else SIZE
    for num in settings.sizes(tuple(STRATEGIES)):
        with (
            Ranks("steps.steps_ranks", num, folder=settings.folder, with_="nbkit", **size) as ours,
            Ranks("steps.steps_ranks", num, folder=settings.folder, with_="torch", **size) as theirs,
        ):
            arms = {"nbkit": ours, "nbkit again": ours, "torch": theirs}
            for name in STRATEGIES[num]:
                for job in (ours, theirs):
                    job.ask("prepare", strategy=name, microbatches=MICROBATCHES)
                seconds: dict[str, list[float]] = {arm: [] for arm in arms}
                for order in shuffled(list(arms), settings.count(ROUNDS)):
                    for arm in order:
                        seconds[arm].append(max(arms[arm].ask("block", steps=STEPS)))
                what = f"step, {name}, {num} ranks, Trainer / torch's own pieces"
                rows.append(
                    compared(what, seconds["nbkit"], PIECES[name], seconds["torch"], seconds["nbkit again"], BAR, "ms")
                )
    return rows
