"""Strategies of a plain script under torchrun: torch's own pieces around the same GPT, each used as documented."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import nbkit
from bench.rigs.jobs import muon_and_adamw, token_loss

Step = Callable[[Tensor, Tensor], None]
"""Makes one step on this rank's rows."""

CPU = torch.device("cpu")


def step_of(strategy: str, model: nbkit.GPT, mesh: DeviceMesh, *, microbatches: int, muon: bool = False) -> Step:
    """Return the step of `strategy` on `model`. mesh: with the axes pp, dp, tp. muon: under ddp, see muon_and_adamw."""
    if strategy in ("ddp", "zero1"):
        wrapped = DistributedDataParallel(model)
        if strategy == "ddp":
            return _plain(wrapped, *(muon_and_adamw(model) if muon else [_adamw(model.parameters())]))
        inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        return _plain(wrapped, inner)
    if strategy == "hsdp shard=2":
        two = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        return _sharded(model, two, reshard=True)
    if strategy in ("zero2", "zero3"):
        return _sharded(model, mesh["dp"], reshard=strategy == "zero3")
    if mesh["tp"].size() > 1:
        _tensor_parallel(model, mesh["tp"])
        if mesh["dp"].size() > 1:
            replicate(model, mesh=mesh["dp"])
        return _plain(model, _by_kind(model), around=loss_parallel)
    stage = _Stage(model, mesh["pp"].get_local_rank(), mesh["pp"].size())
    if mesh["dp"].size() > 1:
        replicate(stage, mesh=mesh["dp"])
    return _piped(stage, mesh["pp"], microbatches)


def _plain(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    def step(ids: Tensor, targets: Tensor) -> None:
        with around():
            loss = token_loss(model(ids), targets)
            for each in optimizers:
                each.zero_grad()
            loss.backward()
        for each in optimizers:
            each.step()

    return step


def _sharded(model: nbkit.GPT, mesh: DeviceMesh, *, reshard: bool) -> Step:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _plain(model, _adamw(model.parameters()))


def _tensor_parallel(model: nbkit.GPT, mesh: DeviceMesh) -> None:
    """Split `model` along tp, without sequence parallelism: gloo's reduce-scatter sends twice the needed bytes."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, ParallelStyle] = {"tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for number, block in enumerate(model.blocks):
        plan |= {f"blocks.{number}.attention.{name}": column for name in ("q", "k", "v")}
        plan |= {f"blocks.{number}.attention.out": row, f"blocks.{number}.up": column, f"blocks.{number}.down": row}
        block.attention.heads //= mesh.size()
    parallelize_module(model, mesh, plan)


def _piped(stage: nn.Module, mesh: DeviceMesh, microbatches: int) -> Step:
    number, last = mesh.get_local_rank(), mesh.size() - 1
    optimizer = _adamw(stage.parameters())
    pipeline = PipelineStage(stage, number, mesh.size(), CPU, group=mesh.get_group())
    schedule = Schedule1F1B(pipeline, microbatches, loss_fn=token_loss)

    def step(ids: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        schedule.step(*([ids] if number == 0 else []), target=targets if number == last else None)
        optimizer.step()

    return step


class _Stage(nn.Module):
    """A pipeline stage: an equal share of the blocks, with what comes before the first block or after the last."""

    def __init__(self, model: nbkit.GPT, number: int, stages: int) -> None:
        super().__init__()
        blocks = len(model.blocks)
        self.blocks = model.blocks[number * blocks // stages : (number + 1) * blocks // stages]
        self.front = nn.ModuleList([model.tokens, model.positions]) if number == 0 else None
        self.end = nn.Sequential(model.norm, model.head) if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.front is not None:
            tokens, positions = self.front
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.end is None else self.end(x)  # type: ignore[no-any-return]


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _by_kind(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with separate groups for DTensors and plain tensors: its foreach code takes no list of both."""
    params = list(model.parameters())
    cut: list[nn.Parameter] = [p for p in params if isinstance(p, DTensor)]
    return torch.optim.AdamW([{"params": cut}, {"params": [p for p in params if not isinstance(p, DTensor)]}], lr=3e-4)
