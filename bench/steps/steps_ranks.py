"""A rank that trains under a strategy, with nbkit's Trainer or with torch's own pieces. Run by bench.rigs.forked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import nbkit
from bench.rigs.jobs import config, data, trainer
from bench.rigs.torch_pieces import step_of
from bench.steps.step_seconds import Paced
from nbkit.strategy import Strategy

ROWS = 64  # of the data set, in batches


class Worker:
    """Trains one strategy after the other; with="nbkit" or "torch"."""

    def __init__(self, *, with_: str, width: int, layers: int, block: int, batch: int) -> None:
        self._prepare = self._trainer if with_ == "nbkit" else self._script
        self._config, self._batch = config(width, layers, block=block), batch
        if with_ == "torch":
            dist.init_process_group("gloo")
        self._train: Callable[[int], None] = lambda steps: None

    def prepare(self, strategy: str, microbatches: int) -> None:
        """Train `strategy` from here on."""
        torch.manual_seed(0)
        self._pace = Paced()
        self._train = lambda steps: None
        self._train = self._prepare(strategy, microbatches)
        self._train(2)

    def block(self, steps: int) -> float:
        """Seconds of a step, of so many."""
        return self.spent(steps)[0]

    def spent(self, steps: int) -> tuple[float, float]:
        """(seconds of a step, of so many; CPU-seconds of this process in it)."""
        dist.barrier()
        self._pace.restart()
        self._train(steps + 1)
        return self._pace.seconds, self._pace.cpu_seconds

    def _trainer(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        if "pp" in strategy:
            strategy += f" microbatches={microbatches}"
        # What is on by default is on: the run is recorded.
        job = trainer(
            self._config, strategy, batch=self._batch, loading=nbkit.Loading(collate=self._pace), log_dir="runs"
        )
        return job.fit

    def _script(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        of = Strategy.parse(strategy, dist.get_world_size())
        mesh = init_device_mesh("cpu", (of.pp, of.dp, of.tp), mesh_dim_names=("pp", "dp", "tp"))
        step = step_of(strategy, nbkit.GPT(self._config), mesh, microbatches=microbatches)
        rows = data(self._config, ROWS * self._batch)
        sampler: DistributedSampler[Any] = DistributedSampler(rows, of.dp, mesh["dp"].get_local_rank())  # type: ignore[arg-type]

        def forever() -> Iterator[Any]:
            epoch = 0
            while True:
                sampler.set_epoch(epoch)
                yield from DataLoader(
                    rows,  # type: ignore[arg-type]
                    self._batch // of.dp,
                    sampler=sampler,
                    collate_fn=self._pace,
                )
                epoch += 1

        batches = forever()

        def train(steps: int) -> None:
            for _ in range(steps):
                step(*next(batches))

        return train
