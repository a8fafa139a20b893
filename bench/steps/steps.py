"""Compare a training step under each strategy with a plain script that uses torch's own pieces.

Both jobs exist at the same time, each with its own ranks. One waits for orders while the other trains. The model, the
batches and the optimizer are the same. nbkit records its run, as by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.jobs import adamw, config, data, muon_and_adamw, trainer
from bench.rigs.torch_pieces import Step, step_of
from bench.settings import Settings, shuffled
from bench.table import Row, compared
from nbkit.strategy import Strategy


class Paced:
    """A collate function that remembers when it was called."""

    def __init__(self) -> None:
        self._stamps: list[float] = []
        self._cpu: list[float] = []

    def __call__(self, samples: list[Any]) -> Any:
        self._stamps.append(time.perf_counter())
        self._cpu.append(time.process_time())
        return default_collate(samples)

    def restart(self) -> None:
        self._stamps.clear()
        self._cpu.clear()

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a step since `restart`, counted from the first batch to the last one."""
        return (self._stamps[-1] - self._stamps[0]) / (len(self._stamps) - 1)

    @property
    def cpu_seconds(self) -> float:
        """Return the same of the CPU time of all threads of this process."""
        return (self._cpu[-1] - self._cpu[0]) / (len(self._cpu) - 1)


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
"""Steps of a block. Each block begins a run, whose second step counts memory for 1.5 ms; later each 100th step does."""
BAR = 1.02


def run(settings: Settings) -> list[Row]:
    """Return one row for each strategy, on 2 ranks or, if it needs them, on 4."""
    rows = []
    size = QUICK if settings.quick else SIZE
    for num in settings.sizes(tuple(STRATEGIES)):
        with (
            Ranks("steps.steps", num, folder=settings.folder, with_="nbkit", **size) as ours,
            Ranks("steps.steps", num, folder=settings.folder, with_="torch", **size) as theirs,
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


ROWS = 64  # batches in the data set


class Worker:
    """A rank that trains one strategy after another. with_: "nbkit" or "torch". muon: train by Muon and AdamW."""

    def __init__(self, *, with_: str, width: int, layers: int, block: int, batch: int, muon: bool = False) -> None:
        self._muon = muon
        self._prepare = self._trainer if with_ == "nbkit" else self._script
        self._config, self._batch = config(width, layers, block=block), batch
        if with_ == "torch":
            dist.init_process_group("gloo")
        self._train: Callable[[int], None] = lambda steps: None

    def prepare(self, strategy: str, microbatches: int) -> None:
        """Make a training of `strategy` for the next blocks, and warm it up."""
        torch.manual_seed(0)
        self._pace = Paced()
        self._train = lambda steps: None
        self._train = self._prepare(strategy, microbatches)
        self._train(2)

    def block(self, steps: int) -> float:
        """Train `steps` steps and return the mean seconds of one."""
        return self.spent(steps)[0]

    def spent(self, steps: int) -> tuple[float, float]:
        """Train `steps` steps and return the mean (seconds, CPU-seconds of this process) of one."""
        dist.barrier()
        self._pace.restart()
        self._train(steps + 1)
        return self._pace.seconds, self._pace.cpu_seconds

    def _trainer(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        if "pp" in strategy:
            strategy += f" microbatches={microbatches}"
        # The run is recorded, as by default.
        job = trainer(
            self._config,
            strategy,
            batch=self._batch,
            optimizer=muon_and_adamw if self._muon else adamw,
            loading=nbkit.Loading(collate=self._pace),
            log_dir="runs",
        )
        return job.fit

    def _script(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        of = Strategy.parse(strategy, dist.get_world_size())
        mesh = init_device_mesh("cpu", (of.pp, of.dp, of.tp), mesh_dim_names=("pp", "dp", "tp"))
        step = step_of(strategy, nbkit.GPT(self._config), mesh, microbatches=microbatches, muon=self._muon)
        return self._loop(step, of.dp, mesh["dp"].get_local_rank())

    def _loop(self, step: Step, replicas: int, index: int) -> Callable[[int], None]:
        """Return a loop of `step` over the rows of data rank `index`. replicas: the number of data ranks."""
        rows = data(self._config, ROWS * self._batch)
        sampler: DistributedSampler[Any] = DistributedSampler(rows, replicas, index)  # type: ignore[arg-type]

        def forever() -> Iterator[Any]:
            epoch = 0
            while True:
                sampler.set_epoch(epoch)
                yield from DataLoader(
                    rows,  # type: ignore[arg-type]
                    self._batch // replicas,
                    sampler=sampler,
                    collate_fn=self._pace,
                )
                epoch += 1

        batches = forever()

        def train(steps: int) -> None:
            for _ in range(steps):
                step(*next(batches))

        return train
