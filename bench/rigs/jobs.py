"""The jobs that the ranks of a benchmark train: a GPT on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.train.trainer import Trainer


def config(width: int, layers: int, *, block: int = 64, heads: int = 8, vocab: int = 256) -> nbkit.GPTConfig:
    return nbkit.GPTConfig(vocab=vocab, block=block, layers=layers, heads=heads, width=width)


def data(of: nbkit.GPTConfig, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, of.vocab, (rows, of.block + 1), generator=draw)
    return [(row[:-1], row[1:]) for row in ids]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for the rest, as most use them."""
    named = dict(model.named_parameters())
    inside = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    rest = [p for name, p in named.items() if name not in inside]
    return [torch.optim.Muon(inside.values(), lr=0.02), torch.optim.AdamW(rest, lr=3e-4)]


def trainer(of: nbkit.GPTConfig, strategy: str, *, batch: int, **changed: Any) -> Trainer:
    """Return a Trainer that records nothing. changed: arguments of Trainer that replace those chosen here."""
    asked: dict[str, Any] = {
        "model": lambda: nbkit.GPT(of),
        "loss": token_loss,
        "optimizer": adamw,
        "data": data(of, 8 * batch),
        "batch_size": batch,
        "strategy": strategy,
        "compute": nbkit.Compute(grad_norm_every=1_000_000),  # never: the norm of the gradients needs communication
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))
