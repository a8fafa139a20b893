"""The workload of `training`: one GPT, once in a loop written by hand over DDP, once in nbkit's Trainer.

Both sides run this same file: torchrun_worker.py imports it, and a cell contains its text. A block is a few steps,
timed on rank 0 from a barrier to the end of the last step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nbkit

CONFIG = nbkit.GPTConfig(vocab=256, block=128, layers=4, heads=4, width=256)
PER_RANK = 8
SEQUENCES = 4_096


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_data() -> TensorDataset:
    ids = torch.randint(0, CONFIG.vocab, (SEQUENCES, CONFIG.block + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def prepare_by_hand() -> Callable[[int], float]:
    """Prepare the loop of a DDP tutorial. Return a function: number of steps -> last loss."""
    torch.manual_seed(0)
    data = make_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    model = DistributedDataParallel(nbkit.GPT(CONFIG))
    optimizer = make_optimizer(model)

    def forever() -> Any:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from DataLoader(data, batch_size=PER_RANK, sampler=sampler)
            epoch += 1

    batches = forever()

    def train(steps: int) -> float:
        value = 0.0
        for step in range(steps):
            ids, targets = next(batches)
            loss = token_loss(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            print(f"step {step} loss {value:.4f}")
        return value

    return train


def prepare_trainer() -> Callable[[int], float]:
    """Prepare a Trainer with default arguments. Return a function like that of `prepare_by_hand`."""
    trainer = nbkit.Trainer(
        model=lambda: nbkit.GPT(CONFIG),
        loss=token_loss,
        optimizer=make_optimizer,
        data=make_data(),
        batch_size=PER_RANK * int(os.environ["WORLD_SIZE"]),  # under torchrun the Trainer joins the world itself
    )
    return lambda steps: float(trainer.fit(steps=steps)[-1]["loss"])


def timed_block(train: Callable[[int], float], steps: int, record: str) -> None:
    """Run a block of `steps` steps. Rank 0 appends its cost to the file `record`."""
    dist.barrier()
    wall, own = time.perf_counter(), time.process_time()
    loss = train(steps)
    wall, own = time.perf_counter() - wall, time.process_time() - own
    if dist.get_rank() == 0:
        with open(record, "a") as file:
            file.write(json.dumps({"seconds": wall / steps, "cpu": own / steps, "loss": loss}) + "\n")
