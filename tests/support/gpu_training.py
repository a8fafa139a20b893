"""A training on the pretended GPU: the ranks, and the job that they train."""

from __future__ import annotations

import warnings
from typing import Any

import pretend
import torch
from pretend import Limits, PretendAccelerator, checked, join

from nbkit.rank.comm import link_probe
from nbkit.rank.device import accelerator
from nbkit.rank.train.trainer import Trainer
from parity.subjects import SUBJECTS, mean
from parity.training import BATCH, LR, SEED


def begun(rank: int, ranks: int) -> tuple[Any, PretendAccelerator]:
    """(world, GPU) of a rank, on which every training is checked operation by operation."""
    made = join(rank, ranks)
    _check_trainings(made[1])
    return made


def place(rank: int, ranks: int) -> Any:
    """Of such a rank, which has not joined the world yet."""
    found = pretend.place(rank, ranks)
    _check_trainings(accelerator())
    return found


def _check_trainings(gpu: Any) -> None:
    warnings.simplefilter("ignore")
    Limits.come = Limits.wait = 40.0
    link_probe._LARGE_ON_DEVICES = 1 << 14  # bandwidths of a GPU, through Python, would take minutes
    fit = Trainer.fit

    def fitted(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        with checked(gpu):
            return fit(trainer, *args, **kwargs)

    Trainer.fit = fitted  # type: ignore[method-assign]


def trainer_of(strategy: str, *, dtype: torch.dtype = torch.float64, **more: Any) -> Trainer:
    """Of the GPT whose truth is `Cell("gpt", "")`."""
    gpt = SUBJECTS["gpt"]
    asked: dict[str, Any] = {
        "model": lambda: gpt.build(dtype, 0.0, 4),
        "loss": mean,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        "data": gpt.items(4 * BATCH, dtype, masked=False),
        "batch_size": BATCH,
        "strategy": strategy,
        "seed": SEED,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | more))
