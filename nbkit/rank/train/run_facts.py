"""Describe a run in words, for its report: model, optimizer, seed, devices and versions."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import nbkit
from nbkit.figures import figure
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.fp8 import spelled_fp8

if TYPE_CHECKING:
    from nbkit.rank.train.job import Job


def run_facts(job: Job) -> dict[str, str]:
    """Return name of a fact -> words. The words name no person, host or folder."""
    optimizer = job.optimizer.inner
    rate = figure(float(optimizer.param_groups[0].get("lr", float("nan"))))
    fp8 = f", {spelled_fp8(job.builder.skeleton)}" if job.builder.options.fp8 else ""
    return {
        "model": type(job.model).__name__,
        "optimizer": type(optimizer).__name__ + (f", lr {rate} at the start" if rate else ""),
        "precision": (job.config.precision or "as the model") + fp8,
        "seed": str(job.seed),
        "ranks": f"{job.world_size} on {accelerator().name(job.device)}, {dist.get_backend()}",
        "versions": f"nbkit {nbkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
