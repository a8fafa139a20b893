"""A rank whose job changes its strategy: what `switch` and `switch_large` measure. Run by bench.rigs.forked."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from bench.rigs.jobs import config, trainer
from bench.rigs.loopback import measured
from bench.switch.dcp_shards import stored
from nbkit.bridge.training_requests import Control, TrainingRequestHandler
from nbkit.errors import Stopped
from nbkit.rank.parallel import find_facts
from nbkit.rank.telemetry.health import bytes_held, reset_peak
from nbkit.rank.train.checkpoint import job_state
from nbkit.rank.train.control import step_boundary
from nbkit.tensor_layout import Layout


class Worker:
    """A job of a GPT that has made its first step."""

    def __init__(self, *, width: int, layers: int, batch: int, vocab: int = 256, block: int = 16) -> None:
        # Equal blocks, so that the stages of two pipelines nest, whatever else the machine did when they were timed.
        setattr(find_facts, "measure_costs", lambda module, chain, call: (1.0,) * len(chain))  # noqa: B010
        of = config(width, layers, vocab=vocab, block=block)
        self.job = trainer(of, "ddp", batch=batch)
        self.job.fit(1)
        self.controls = TrainingRequestHandler()

    def switch(self, strategy: str) -> dict[str, Any]:
        """What Trainer.switch says of a switch between two steps, and what the network saw of it."""
        return self._watched(lambda act: act(lambda: self.job.switch(strategy)))

    def click(self, strategy: str) -> dict[str, Any]:
        """The same, asked for by another thread while it trains, as a notebook does."""
        asked = Control(strategy, "switch", {"strategy": strategy})
        self.controls.results.clear()

        def follow(trainer: Any, record: dict[str, Any]) -> None:
            if record["step"] == first:
                number = step_boundary.inbox.acted + 1
                Thread(target=step_boundary.inbox.post, args=(number, "control", asked)).start()
            elif self.controls.results:
                raise Stopped("the switch has happened, at the same step on every rank")

        def train(act: Callable[[Callable[[], object]], None]) -> None:
            step_boundary.handlers["control"] = lambda control: act(lambda: self.controls.serve(control))
            with suppress(Stopped):
                self.job.fit(10_000)

        first, self.job._callbacks = self.job.step + 1, (follow,)
        found = self._watched(train)
        self.job._callbacks = ()
        return found

    def _watched(self, run: Callable[[Callable[[Callable[[], object]], None]], object]) -> dict[str, Any]:
        """run: calls what it is given with the switch itself."""
        # What a step, a load or an earlier switch left behind is not the switch's.
        gc.collect()
        _, idle = measured(lambda: None)
        seen: dict[str, int] = {}

        def act(switch: Callable[[], object]) -> None:
            now = bytes_held()[0]
            reset_peak()
            seen["wire"] = measured(switch)[1] - idle
            seen["extra"] = bytes_held()[1] - now

        run(act)
        done = self.job.job.switches[-1]
        return {
            **seen,
            "moved": done.moved_bytes,
            "beside": done.beside_s,
            "prepare": done.prepare_s,
            "pause": done.pause_s,
            "proof": done.proof_s,
            "identical": done.identical,
            "holds": sum(tensor.nbytes for tensor, _ in self._state().values()),
        }

    def holding(self) -> dict[str, Layout]:
        """What this rank holds, weights and optimizer state."""
        return {key: layout for key, (_, layout) in self._state().items()}

    def step(self) -> float:
        """One step; its loss."""
        return float(self.job.fit(1)[-1]["loss"])

    def exchange(self, pairs: dict[tuple[int, int], int]) -> float:
        """Seconds of one all-to-all from and into flat buffers. pairs: (from rank, to rank) -> bytes."""
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        given, taken = [pairs.get((rank, r), 0) for r in ranks], [pairs.get((r, rank), 0) for r in ranks]
        outgoing, incoming = torch.ones(sum(given), dtype=torch.uint8), torch.empty(sum(taken), dtype=torch.uint8)
        return measured(lambda: dist.all_to_all_single(incoming, outgoing, taken, given))[0]

    def save(self, path: str) -> float:
        """Seconds that torch.distributed.checkpoint takes to write weights and optimizer state."""
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        state = {key: stored(tensor, layout) for key, (tensor, layout) in self._state().items()}
        return measured(lambda: state_dict_saver.save(state, checkpoint_id=path))[0]

    def load(self, path: str) -> tuple[float, bool]:
        """(seconds that it takes to read them as this rank holds them now, whether they are the same)."""
        held = self._state()
        fresh = {key: (torch.full_like(tensor, float("nan")), layout) for key, (tensor, layout) in held.items()}
        state = {key: stored(tensor, layout) for key, (tensor, layout) in fresh.items()}
        seconds = measured(lambda: state_dict_loader.load(state, checkpoint_id=path))[0]
        same = all(torch.equal(tensor, held[key][0]) for key, (tensor, _) in fresh.items())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return seconds, same

    def many(self, strategies: list[str]) -> list[dict[str, float]]:
        """Open files, threads and resident bytes after each switch; a step follows each."""
        found = []
        for strategy in strategies:
            began = time.perf_counter()
            self.job.switch(strategy)
            self.job.fit(1)
            found.append(
                {
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "bytes": bytes_held()[0],
                    "seconds": time.perf_counter() - began,
                }
            )
        return found

    def _state(self) -> dict[str, tuple[Tensor, Layout]]:
        sharded_model, inner = self.job.job.sharded_model, self.job.job.optimizer.inner
        return job_state.weights(sharded_model) | job_state.per_element(sharded_model, inner)
