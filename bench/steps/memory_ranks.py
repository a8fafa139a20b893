"""A rank that counts what it holds at the end of a step. Run by bench.rigs.forked."""

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
from bench.rigs.jobs import config, data, token_loss
from nbkit.rank.parallel.sharded_model import ShardedModel

STEPS = 2
SETTLE_SECONDS = 0.3


class Worker:
    """Nothing is kept from one strategy to the next."""

    def held(self, *, width: int, layers: int, block: int, batch: int, strategy: str) -> dict[str, int]:
        """held: bytes of parameters, gradients and optimizer state; rest: of all other tensors that there are."""
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
                # What torch's own threads have just done with is theirs for a moment.
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
        warnings.simplefilter("ignore")  # asking some of torch's lazy objects what they are warns
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of the storages behind these tensors."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and storage.nbytes() and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found
