"""Puts a setting in force between two steps: rows of a forward pass, recomputation, offload and strategy."""

from __future__ import annotations

from dataclasses import replace

from nbkit.rank.data.batch_size import Arithmetic
from nbkit.rank.parallel.module.activation_checkpoint import recompute
from nbkit.rank.parallel.parallelize import blocks_held
from nbkit.rank.train.job import Job
from nbkit.rank.train.out_of_memory.remedies import Setting
from nbkit.rank.train.step.optimizer_offload import offload, to_host


def apply(job: Job, setting: Setting, batch: int) -> None:
    """The next step is made with `setting`. Collective. batch: rows of the global batch.

    Raises SwitchError where its strategy cannot be put in force: the old one is, with the rest of the setting.
    """
    now = Setting.of(job, batch)
    if setting.recompute and not now.recompute:
        _recompute(job)
    if setting.offload and not now.offload:
        offload(job.optimizer.inner)
        to_host(job.optimizer.inner)
        _configure(job, offload="cpu")
        job.builder.offload = True
    most = Arithmetic.of(batch, setting.strategy, microbatch_size=None).micro
    if setting.strategy.pp == 1 and (setting.microbatch_size < most or job.config.microbatch_size is not None):
        _cut(job, setting)
    job.forget_estimates()
    job.switch(str(setting.strategy))
    job.feed.recut()


def _configure(job: Job, **changed: object) -> None:
    job.config = job.builder.config = replace(job.builder.config, **changed)  # type: ignore[arg-type]


def _cut(job: Job, setting: Setting) -> None:
    _configure(job, microbatch_size=setting.microbatch_size)
    job.builder.choose(cut=True)
    job.training_step.microbatch_size = setting.microbatch_size


def _recompute(job: Job) -> None:
    _configure(job, recompute=True)
    job.builder.choose(recompute=True)
    recompute(
        job.sharded_model.module, blocks_held(job.sharded_model.module, job.builder.options, job.builder.skeleton)
    )
