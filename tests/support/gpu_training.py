"""A training on the pretended GPU, or on a real one that all ranks share: the ranks, and the job that they train."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import pretend
from pretend import Limits, PretendAccelerator, checked, join
from ranks import listeners

from nbkit.rank.comm import link_probe
from nbkit.rank.device import accelerator
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.world import RankPlace, World
from verify.cases import Case
from verify.training import trainer_of as job_of

REAL = os.environ.get("NBKIT_CHECK_REAL_GPU", "")
"""The backend between ranks that share the GPU of this machine, or "" for a pretended GPU."""


def begun(rank: int, ranks: int) -> tuple[Any, PretendAccelerator]:
    """Return (world, GPU) of a rank. On a pretended GPU, every operation of a training is checked."""
    if REAL:
        warnings.simplefilter("ignore")
        address, port = listeners[0].getsockname()
        shared: Any = accelerator()
        return World.join(place(rank, ranks), listen=listeners[0], address=address, port=port), shared
    made = join(rank, ranks)
    _check_trainings(made[1])
    return made


def place(rank: int, ranks: int) -> Any:
    """Return the place of a rank on this GPU, before it joins the world."""
    if REAL:
        # NCCL refuses two ranks of one host on one GPU, so it is told that they are on several hosts with sockets.
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{rank}"
        return RankPlace(rank, ranks, rank, ranks, accelerator().kind, REAL)
    found = pretend.place(rank, ranks)
    _check_trainings(accelerator())
    return found


def looked_at(gpu: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that checks operations on a pretended GPU, and does nothing on a real one."""
    return contextlib.nullcontext() if REAL else checked(gpu)


def _check_trainings(gpu: Any) -> None:
    warnings.simplefilter("ignore")
    Limits.come = Limits.wait = 40.0
    link_probe._LARGE_ON_DEVICES = 1 << 14  # bandwidths of a GPU, through Python, would take minutes
    fit = Trainer.fit

    def fitted(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        with checked(gpu):
            return fit(trainer, *args, **kwargs)

    Trainer.fit = fitted  # type: ignore[method-assign]


def trainer_of(strategy: str, *, dtype: str = "float64", **more: Any) -> Trainer:
    """Return a Trainer of the GPT of `Case("gpt", "")`, whose truth applies to it."""
    return job_of(Case("gpt", strategy, dtype), **more)
