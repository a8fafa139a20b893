"""One cell trained twice: on ranks through the Trainer, and in one process by a loop in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

import nbkit
from nbkit.rank.data.batch import call
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.train.checkpoint.job_state import weights
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer
from nbkit.tensor_layout import Layout
from parity.cells import Cell
from parity.subjects import SUBJECTS, mean, weighted

SEED, BATCH, RAGGED, LR, CLIP, DROP = 5, 16, 3, 3e-4, 0.1, 0.1

Pieces = Mapping[str, tuple[Tensor, Layout]]


@dataclass(frozen=True)
class Truth:
    """Of one process. grads: of the first step, before clipping; weights: after the last one; by original name."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass
class Outcome:
    """Of one rank: its pieces of the same. strategy: as the Trainer understood it."""

    strategy: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: Pieces = field(default_factory=dict)
    weights: Pieces = field(default_factory=dict)


def _items(cell: Cell) -> list[tuple[Any, Any]]:
    num = BATCH + RAGGED if "ragged" in cell.extras else 4 * BATCH
    return SUBJECTS[cell.subject].items(num, getattr(torch, cell.dtype), masked="mask" in cell.extras)


def _build(cell: Cell) -> nn.Module:
    dropout = DROP if "dropout" in cell.extras else 0.0
    return SUBJECTS[cell.subject].build(getattr(torch, cell.dtype), dropout, cell.layers)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def ours(cell: Cell) -> Outcome:
    """Trained by nbkit, on all ranks of the world. Collective."""
    found = Outcome()
    trainer = Trainer(
        model=lambda: _build(cell),
        loss=weighted if "mask" in cell.extras else mean,
        optimizer=_optimizer,
        data=_items(cell),
        batch_size=BATCH,
        strategy=cell.strategy,
        hints=nbkit.ModelHints(stages=SUBJECTS[cell.subject].stages if "pp=5" in cell.strategy else None),
        seed=SEED,
        precision="bf16" if "bf16" in cell.extras else None,
        clip_norm=CLIP if "clip" in cell.extras else None,
        compute=nbkit.Compute(
            microbatch_size=2 if "accumulate" in cell.extras else None,
            recompute="recompute" in cell.extras,
            grad_norm_every=1,
        ),
        log_dir=None,
        progress=False,
    )
    job = trainer.job
    backward = job.backward

    def noted(batch: Any) -> Any:
        result = backward(batch)
        if not found.grads:
            held = job.sharded_model.held.items()
            found.grads = {n: (_grad(p), job.sharded_model.data.layouts[n]) for n, p in held if p.requires_grad}
        return result

    job.backward = noted  # type: ignore[method-assign]
    records = trainer.fit(cell.steps)
    found.strategy = str(trainer.strategy)
    found.losses = [record["loss"] for record in records]
    found.norms = [record["grad_norm"] for record in records]
    held = weights(job.sharded_model).items()
    found.weights = {n.removeprefix("weight/"): (tensor.clone(), layout) for n, (tensor, layout) in held}
    return found


def _grad(param: Tensor) -> Tensor:
    return torch.zeros_like(param).detach() if param.grad is None else param.grad.clone()


def by_hand(cell: Cell) -> list[float]:
    """Losses of the same training, on all ranks, by a loop around `nbkit.prepare`. Collective."""
    data = _items(cell)
    batches = [default_collate([data[i] for i in chosen]) for chosen in _chosen(cell, len(data))]
    loss = weighted if "mask" in cell.extras else mean
    job = prepare(
        lambda: _build(cell),
        _optimizer,
        loss=loss,
        strategy=cell.strategy,
        seed=SEED,
        hints=nbkit.ModelHints(example=batches[0]),
    )
    for batch in job.batches(batches):
        job.backward(batch)
        if "clip" in cell.extras:
            job.clip(CLIP)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [record["loss"] for record in job.history]


def _chosen(cell: Cell, num: int) -> Iterator[list[int]]:
    """Which of `num` samples are in the batch of each step: the pinned order."""
    epoch = at = 0
    for _ in range(cell.steps):
        order = torch.randperm(num, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        yield order[at : at + BATCH]
        at += BATCH
        if at >= num:
            epoch, at = epoch + 1, 0


def truth(cell: Cell, *, rows: int = BATCH, wrap: Any = nullcontext, device: str = "cpu") -> Truth:
    """Trained by a loop in plain torch, in this process. rows: per forward; wrap: a context around the passes."""
    model, data = _build(cell).to(device), _items(cell)
    optimizer = _optimizer(model)
    keyed = KeyedDropout(model, SEED)
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, Tensor] = {}
    bf16 = "bf16" in cell.extras
    for chosen in _chosen(cell, len(data)):
        loss = torch.zeros((), dtype=torch.float64)
        total = torch.zeros(())
        for first in range(0, len(chosen), rows):
            part = chosen[first : first + rows]
            value, target = tree_map_only(Tensor, lambda one: one.to(device), default_collate([data[i] for i in part]))
            cast = torch.autocast(device, torch.bfloat16, enabled=bf16)
            with keyed.step(len(losses), range(first, first + len(part))), cast, wrap():
                output = call(model, value)
                if "mask" in cell.extras:
                    share, weight = weighted(output, target)
                else:
                    share, weight = mean(output, target) * (len(part) / len(chosen)), torch.zeros(())
                share.backward()
            loss, total = loss + share.detach().cpu(), total + weight.cpu()
        if "mask" in cell.extras:
            loss = loss / total
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= total.to(device)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        grads = grads or {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm([g.double() for g in own])
        if "clip" in cell.extras:
            torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        norms.append(float(norm))
    return Truth(losses, norms, grads, {n: p.detach().cpu().clone() for n, p in model.named_parameters()})
