"""A rank of a pipeline whose stages sleep, started by torchrun.

Rank 0 prints JSON: for every step its seconds, and its idle share (the mean over the ranks).

torchrun --nproc-per-node P bench/pipeline/sleeping_rank.py '{"cases": [["zbv", 8, 0.02], ...], "rounds": 3}'
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.parallel.pipeline.executor import Pipeline
from nbkit.rank.world.world import World
from nbkit.schedules import Schedule

_LATE = 0.0002
"""Seconds by which the kernel may wake a sleeper too late. `until` spends them in a loop that reads the clock."""

_PR_SET_TIMERSLACK = 29


def last(seconds: float) -> None:
    """Wait for exactly `seconds`, so that all other time of a step is the executor's."""
    until(time.perf_counter() + seconds)


def until(moment: float) -> None:
    """Sleep until `moment` of time.perf_counter."""
    if (left := moment - time.perf_counter()) > _LATE:
        time.sleep(left - _LATE)
    while time.perf_counter() < moment:
        pass


class Along(torch.autograd.Function):
    """The part of a stage that depends on its input. Forward and backward take `seconds` each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        last(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        last(ctx.seconds)
        return grad, None


class Beside(torch.autograd.Function):
    """The part of a stage that depends on a weight. Only backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        last(ctx.seconds)
        return grad, None


def main(order: str) -> None:
    asked = json.loads(order)
    world = World.join_from_env()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pipelines = {
        name: Pipeline(Schedule.of(name, ranks, 4), group, rank, torch.device("cpu"))
        for name in dict.fromkeys(name for name, _, _ in asked["cases"])
    }
    results = []
    for name, num_micro, unit in asked["cases"]:
        _step(pipelines[name], num_micro, 0.0)
        steps = [_step(pipelines[name], num_micro, unit) for _ in range(asked["rounds"])]
        results.append([name, num_micro, unit, steps])
    if rank == 0:
        print(json.dumps(results), flush=True)
    world.leave()


def _step(pipeline: Pipeline, num_micro: int, seconds: float) -> tuple[float, float]:
    """Run a step and return (seconds, idle share).

    The step lasts from the start of the last rank to the end of the last rank.
    """
    weight, entrance = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    last = pipeline.schedule.num_stages - 1

    def forward(stage: int, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = Along.apply(received[0] if received else entrance, seconds) + Beside.apply(weight, seconds)
        return (x.sum(),) if stage == last else (x,)

    spent: list[int] = []

    def on_op(kind: str, stage: int, micro: int) -> Callable[[], None]:
        began = time.perf_counter_ns()
        return lambda: spent.append(time.perf_counter_ns() - began)

    dist.barrier()
    start = time.monotonic()
    pipeline.run(num_micro, forward, lambda micro: "same", on_op=on_op)
    mine = torch.tensor([start, time.monotonic(), sum(spent) / 1e9], dtype=torch.float64)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    starts, stops, busy = torch.stack(every).unbind(dim=1)
    took = float(stops.max() - starts.max())
    return took, 1 - float(busy.mean()) / took


if __name__ == "__main__":
    main(*sys.argv[1:])
