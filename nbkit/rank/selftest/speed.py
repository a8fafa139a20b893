"""Compares the seconds of a step under nbkit and under torch's own implementations, with a model that fits.

It also times attention under context parallelism, measures what a communicator costs, and trains a model that is large
for one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from nbkit.planner.choose.load import DEVICES
from nbkit.planner.gpt_config import GPTConfig
from nbkit.rank.comm.group_creation import split_from_world
from nbkit.rank.comm.link_probe import link_of
from nbkit.rank.device import accelerator
from nbkit.rank.models.gpt import GPT, Attention
from nbkit.rank.parallel.context.attention import ContextAttentionMode
from nbkit.rank.parallel.context.peers import Peers
from nbkit.rank.selftest.small_job import mean_loss
from nbkit.rank.telemetry.collectives import ring
from nbkit.rank.telemetry.health import bytes_held, reset_peak
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import World
from nbkit.records.readings import sent_bytes
from nbkit.tensor_layout import head_and_tail

PAIRS, WARM = 12, 2
_CPU_MODEL = GPTConfig(vocab=256, block=64, layers=4, heads=4, width=128)
# 1.04 B, 350 M and 125 M parameters. If none fits, the last one is used.
_MODELS = tuple(
    GPTConfig(vocab=32_000, block=1024, layers=layers, heads=width // 64, width=width)
    for layers, width in ((18, 2048), (24, 1024), (12, 768))
)
# Bytes per parameter. _STATE: weights, gradients and both moments of AdamW in fp32. _BYTES: two models at once, and
# half as much again for activations.
_STATE = 16
_BYTES = _STATE * 2 * 1.5


def compare(strategy: str, folder: str | None = None) -> dict[str, Any]:
    """Time steps under `strategy` (ddp, zero3, tp or pp) and in torch's counterpart, in turns. Collective.

    Returns the seconds of a step of both, for each turn. mfu: nbkit's model FLOPs utilisation, relative to the device's
    data sheet; None if that is unknown.
    """
    place = World.join_from_env().place
    device = accelerator().device(place.device)
    config = _fitting(device)
    bf16 = accelerator().holds(device) and not accelerator().emulates_bf16(device)
    per_rank, steps = (4, 5) if accelerator().holds(device) else (4, 2)
    rows = _rows(config, per_rank * place.world_size)
    ours = _Ours(config, rows, per_rank * place.world_size, strategy, bf16, device, folder)
    if strategy == "pp":
        theirs = _pipelined(config, rows, per_rank * place.world_size, bf16, device)
    else:
        theirs = _plain(config, rows, per_rank, strategy, bf16, device)
    ours(WARM), theirs(WARM)
    found: dict[str, list[float]] = {"nbkit": [], "torch": []}
    for pair in range(PAIRS):
        arms: list[tuple[str, Callable[[int], float]]] = [("nbkit", ours), ("torch", theirs)]
        for name, train in arms if pair % 2 == 0 else reversed(arms):
            dist.barrier()
            found[name].append(train(steps))
    tokens, num = per_rank * place.world_size * config.block, _elements(config)
    peak = _peak(accelerator().name(device)) if bf16 else None
    # FLOPs per token. Forward uses every weight once, and backward twice. The same holds for the products of attention.
    flops = (6 * num + 12 * config.layers * config.width * config.block) * tokens
    used = flops / median(found["nbkit"]) / place.world_size
    return found | {"tokens": tokens, "parameters": num, "bf16": bf16, "mfu": used / peak if peak else None}


def context(degree: int, sizes: tuple[int, int] | None = None) -> dict[str, Any]:
    """Time the attention of a block, forward and backward, under cp=`degree` and on one device, in turns. Collective.

    degree: divides the number of ranks. sizes: (tokens of a rank under cp and of the one device, width). A query of a
    rank attends to `degree` times as many keys as one of the device.
    Returns the seconds of a step of both, for each turn, and the number of tokens. sent: bytes that this rank sends in
    a step under cp. hidden: share of the time of its collectives in which it did not wait for them; None if none was
    timed.
    """
    place = World.join_from_env().place
    device = accelerator().device(place.device)
    on_device = accelerator().holds(device)
    tokens, width = sizes or ((4096, 1024) if on_device else (64, 128))
    steps = 5 if on_device else 2
    groups = [dist.new_group(range(first, first + degree)) for first in range(0, place.world_size, degree)]
    peers = Peers(groups[place.rank // degree], head_and_tail)
    kind = torch.bfloat16 if on_device and not accelerator().emulates_bf16(device) else torch.float32
    attention = Attention(GPTConfig(heads=width // 64, width=width)).to(device, kind)
    x = torch.randn(1, tokens, width, device=device, dtype=kind, requires_grad=True)
    grad = torch.randn_like(x)

    def refuse(what: str, numbers: str) -> Exception:
        return AssertionError(f"{what} {numbers}")

    def train(split: bool) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            split_over = ContextAttentionMode(peers, degree * tokens, frozenset(), refuse) if split else nullcontext()
            with split_over:
                output = attention(x)
            output.backward(grad)
        _wait(device)
        return (time.perf_counter() - began) / steps

    train(True), train(False)
    found: dict[str, list[float]] = {"cp": [], "one": []}
    for pair in range(PAIRS):
        for name in ("cp", "one") if pair % 2 == 0 else ("one", "cp"):
            dist.barrier()
            found[name].append(train(name == "cp"))
    first = ring.end
    train(True)
    calls, _ = ring.between(first, ring.end)
    sent = sum(sent_bytes(call.op, call.bytes, degree) for call in calls) / steps
    for call in calls:
        if call.on_device is not None:
            call.on_device.resolve()
    timed = [(call.seconds, call.blocked_seconds) for call in calls]
    known = [(took, waited) for took, waited in timed if took and waited is not None]
    hidden = 1 - sum(min(waited, took) for took, waited in known) / sum(took for took, _ in known) if known else None
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found | {"tokens": tokens, "sent": sent, "hidden": hidden}


def bandwidth() -> dict[str, tuple[float, float]]:
    """Measure the links. Collective.

    Returns operation -> (bytes per second that a rank sends, seconds of a tiny operation).
    """
    place = World.join_from_env().place
    link = link_of(accelerator().device(place.device))
    return {} if link is None else {name: (way.speed, way.latency) for name, way in link.ways.items()}


def communicators() -> dict[str, tuple[float, int]]:
    """Make communicators of all ranks in several ways. Collective.

    Returns way -> (seconds, bytes of device memory that the communicator took).
    """
    device = accelerator().device(World.join_from_env().place.device)
    on_device, found = accelerator().holds(device), {}
    for how in ("new", "split") if on_device else ("new",):
        if on_device:
            accelerator().trim()
            _wait(device)
        dist.barrier()
        free = accelerator().free_memory(device) if on_device else 0
        began = time.perf_counter()
        group = dist.new_group(backend=dist.get_backend())
        with split_from_world(group) if how == "split" else nullcontext():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        _wait(device)
        took = time.perf_counter() - began
        found[how] = took, free - accelerator().free_memory(device) if on_device else 0
        dist.destroy_process_group(group)
    return found


def large(device_bytes: int | None = None) -> dict[str, float] | None:
    """Train a model whose weights take over a third of a device, for two steps under zero3. Collective.

    device_bytes: the memory of a device; None asks the device. Returns the bytes of the weights, the bytes of a device,
    the peak bytes on this rank, and the last loss. Returns None if weights, gradients and moments would not fit into
    all devices together.
    """
    place = World.join_from_env().place
    device = accelerator().device(place.device)
    asked = torch.tensor([device_bytes or accelerator().free_memory(device)], dtype=torch.float64, device=device)
    dist.all_reduce(asked, op=dist.ReduceOp.MIN)
    room, width = float(asked), 4096 if accelerator().holds(device) else 256
    config = GPTConfig(vocab=1024, block=128, layers=1, heads=width // 64, width=width)
    layers = int(room / 3 / (4 * 12 * width**2)) + 1
    config = replace(config, layers=layers)
    elements = _elements(config)
    if elements * _STATE > 0.8 * room * place.world_size:
        return None
    reset_peak(device)
    trainer = Trainer(
        model=lambda: GPT(config),
        loss=mean_loss,
        optimizer=_adamw,
        data=_rows(config, place.world_size),
        batch_size=place.world_size,
        strategy="zero3",
        precision="bf16" if accelerator().holds(device) else None,
        log_dir=None,
        progress=False,
    )
    trainer.fit(2)
    peak = bytes_held(device)[1]
    return {"weights": 4 * elements, "device": room, "peak": peak, "loss": trainer.history[-1]["loss"]}


class _Ours:
    """A Trainer with default settings. A call trains some steps and returns the seconds of one step."""

    def __init__(
        self,
        config: GPTConfig,
        rows: list[Any],
        batch: int,
        strategy: str,
        bf16: bool,
        device: torch.device,
        folder: str | None,
    ) -> None:
        self.ends: list[float] = []

        def built() -> nn.Module:
            with device:
                return GPT(config)

        self.trainer = Trainer(
            model=built,
            loss=mean_loss,
            optimizer=_adamw,
            data=rows,
            batch_size=batch,
            strategy=f"pp schedule=1f1b microbatches={2 * dist.get_world_size()}" if strategy == "pp" else strategy,
            precision="bf16" if bf16 else None,
            callbacks=[lambda trainer, record: self.ends.append(time.perf_counter())],
            log_dir=folder,
            progress=False,
        )

    def __call__(self, steps: int) -> float:
        # The first step of a run is not counted, because it includes the start of the run.
        self.ends.clear()
        self.trainer.fit(steps + 1)
        return (self.ends[-1] - self.ends[0]) / steps


def _plain(
    config: GPTConfig, rows: list[Any], per_rank: int, strategy: str, bf16: bool, device: torch.device
) -> Callable[[int], float]:
    """Return a function that does the same training by hand, as in the tutorials of DDP and FSDP2."""
    with device:
        model: nn.Module = GPT(config)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if bf16 and strategy != "zero3":
        around = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "tp":
        _split(model, device)
    else:
        _shard(model, bf16)
    optimizer = _adamw(model)
    own = {"num_replicas": 1, "rank": 0} if strategy == "tp" else {}  # all ranks compute all rows
    per_rank *= dist.get_world_size() if strategy == "tp" else 1
    sampler: DistributedSampler[Any] = DistributedSampler(rows, **own)  # type: ignore[arg-type]
    loader: DataLoader[Any] = DataLoader(rows, per_rank, sampler=sampler)  # type: ignore[arg-type]

    def batches() -> Any:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    feed = batches()

    def train(steps: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            ids, targets = (part.to(device, non_blocking=True) for part in next(feed))
            with around():
                loss = mean_loss(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _wait(device)
        return (time.perf_counter() - began) / steps

    return train


def _split(model: Any, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # these take seconds; only needed here
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    columns, rows = ("attention.q", "attention.k", "attention.v", "up"), ("attention.out", "down")
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()


class _TorchStage(nn.Module):
    """The part of a GPT that one pipeline stage computes."""

    def __init__(self, model: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        self.blocks = model.blocks[layers * rank // ranks : layers * (rank + 1) // ranks]
        self.enter = nn.ModuleList([model.tokens, model.positions] * (rank == 0))
        self.leave = nn.Sequential(*[model.norm, model.head] * (rank == ranks - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.enter):
            tokens, positions = self.enter
            x = tokens(x) + positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


def _pipelined(
    config: GPTConfig, rows: list[Any], batch: int, bf16: bool, device: torch.device
) -> Callable[[int], float]:
    """Return a function that does the same training as a pipeline of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes a second; only needed here

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with device:
        part = _TorchStage(GPT(config), rank, ranks)
    schedule = Schedule1F1B(PipelineStage(part, rank, ranks, device), 2 * ranks, loss_fn=mean_loss)
    optimizer = _adamw(part)
    ids, targets = (torch.stack([row[n] for row in rows[:batch]]).to(device) for n in (0, 1))

    def train(steps: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                schedule.step(*[ids] * (rank == 0), target=targets if rank == ranks - 1 else None)
            optimizer.step()
        _wait(device)
        return (time.perf_counter() - began) / steps

    return train


def _shard(model: Any, bf16: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes two seconds; only needed here

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy)


def _fitting(device: torch.device) -> GPTConfig:
    """Return the largest model of which two copies fit, the same on all ranks. Collective."""
    if not accelerator().holds(device):
        return _CPU_MODEL
    free = torch.tensor([accelerator().free_memory(device)], dtype=torch.float64, device=device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return next((each for each in _MODELS if _elements(each) * _BYTES < float(free)), _MODELS[-1])


def _elements(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def _peak(name: str) -> float | None:
    """Return the bf16 FLOP/s in the data sheet of the device called `name`; None for an unknown device."""
    said = name.replace(" ", "").lower()
    return next((one.flops for key, one in DEVICES.items() if key.split("-")[0].lower() in said), None)


def _rows(config: GPTConfig, batch: int) -> list[Any]:
    ids = torch.randint(0, config.vocab, (4 * batch, config.block + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in ids]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def _wait(device: torch.device) -> None:
    if accelerator().holds(device):
        accelerator().wait_for_all(device)
