"""Compare the bytes that ranks hold at the end of a step, gradients included, with published formulas.

The bytes are those of the tensors' storages. Other tensors that are alive in the process are counted separately.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model, bytes_at_rest
from bench.rigs.jobs import config, data, token_loss
from bench.settings import Settings
from bench.table import Row
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.strategy import Strategy

RANKS = (2, 4, 8)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp", "pp")
PER_PARAMETER = {"ddp": "16", "zero1": "8+8/N", "zero2": "4+12/N", "zero3": "16/N", "tp": "16/N", "pp": "16/N"}
WIDTH, LAYERS, BLOCK, BATCH = 256, 8, 16, 16
BAR = 0.005
REST_BYTES = 1 << 20
"""For the batch and for numbers about the step. More would mean a copy of something."""


def run(settings: Settings) -> list[Row]:
    """Return one row for each strategy, with all numbers of ranks."""
    width = 64 if settings.quick else WIDTH
    model = Model(vocab=256, block=BLOCK, layers=LAYERS, width=width, batch=BATCH)
    ratios: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    rest: dict[str, list[int]] = {name: [] for name in STRATEGIES}
    most: dict[str, dict[int, float]] = {name: {} for name in STRATEGIES}
    sizes = settings.sizes(RANKS)
    for num in sizes:
        with Ranks("steps.memory", num, folder=settings.folder) as ranks:
            for name in STRATEGIES:
                said = ranks.ask("held", width=width, layers=LAYERS, block=BLOCK, batch=BATCH, strategy=name)
                expected = bytes_at_rest(model, Strategy.parse(name, num))
                ratios[name][num] = sum(one["held"] for one in said) / expected
                most[name][num] = max(one["held"] for one in said) / model.parameters
                rest[name].append(max(one["rest"] for one in said))
    return [_row(name, ratios[name], most[name], rest[name]) for name in STRATEGIES if sizes]


def _row(name: str, ratios: dict[int, float], most: dict[int, float], rest: list[int]) -> Row:
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    every = ", ".join(f"{n} ranks {size:.3f}" for n, size in most.items())
    return Row(
        f"tensor bytes at the end of a step, {name}",
        f"per parameter, the fullest of {every}",
        f"{PER_PARAMETER[name]} bytes; beside it at most {max(rest) / 1e6:.2f} MB of other tensors",
        f"{worst:.5f}",
        "",
        f"1 ± {BAR:g}; ≤ {REST_BYTES >> 20} MB beside it",
        abs(worst - 1) <= BAR and max(rest) <= REST_BYTES,
        {"held / formula": list(ratios.values())},
    )


STEPS = 2
SETTLE_SECONDS = 0.3


class Worker:
    """A rank that keeps nothing from one strategy to the next."""

    def held(self, *, width: int, layers: int, block: int, batch: int, strategy: str) -> dict[str, int]:
        """Train and return bytes.

        held: of parameters, gradients and optimizer state. rest: of all other tensors that are new.
        """
        gc.collect()
        before = _storages(_alive())
        of = config(width, layers, block=block)
        rows = data(of, batch)
        batches = [tuple(torch.stack(part) for part in zip(*rows, strict=True))] * STEPS
        job = nbkit.prepare(
            lambda: nbkit.GPT(of),
            lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
            loss=token_loss,
            strategy=strategy,
            hints=nbkit.ModelHints(example=tuple(part[:2] for part in batches[0])),
            log_dir=None,
        )
        said = {}
        for made, batch_ in enumerate(job.batches(batches), 1):
            job.backward(batch_)
            job.optimizer.step()
            if made == STEPS:
                # torch's own threads hold tensors for a moment after they have used them.
                dist.barrier()
                time.sleep(SETTLE_SECONDS)
                gc.collect()
                held = _storages(_of(job.sharded_model, job.optimizer.inner))
                other = {at: size for at, size in _storages(_alive()).items() if at not in held and at not in before}
                said = {"held": sum(held.values()), "rest": sum(other.values())}
            job.optimizer.zero_grad()
        job.sharded_model.data.close()
        return said


def _of(sharded_model: ShardedModel, optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    params = [*sharded_model.module.parameters(), *sharded_model.held.values()]
    yield from params
    yield from (p.grad for p in params)
    for state in optimizer.state.values():
        yield from state.values()


def _alive() -> Iterable[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's lazy objects warn when their type is read
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the storages behind these tensors: address -> bytes."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and storage.nbytes() and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found
