"""Define the settings of a job (besides its model, optimizer and strategy), and the settings of a Trainer's loop.

They do not depend on the strategy, and they are frozen, so that another process can take them over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.data.batch import check_inputs
from nbkit.rank.data.data_rng import alike
from nbkit.rank.data.open_stream import open_stream, refuse_loader
from nbkit.rank.data.sample_rows import Sample
from nbkit.rank.data.split.data_shards import data_shards, why_whole
from nbkit.rank.data.stream import Stream, is_map_style
from nbkit.rank.device import accelerator
from nbkit.rank.loss.output_tensors import loss_of_outputs
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.fact_finder import ModelExample
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.rank.train.step.precision import PRECISIONS
from nbkit.strategy import Strategy
from nbkit.trainer_options import Checkpoints, Compute, Loading, ModelHints, Recovery


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a job; see `prepare`. Raises TrainingError for an unknown precision.

    sample: reads the rows on which the loss is examined; default: the rows of `hints.example`. batch: rows of a global
    batch, if known in advance.
    """

    loss: Loss
    seed: int = 0
    inputs: Sequence[str] | None = None
    precision: str | None = None
    compute: Compute = Compute()
    hints: ModelHints = ModelHints()
    sample: Callable[[], Sample | None] | None = None
    batch: int | None = None

    def fuses_dropout(self, device: torch.device) -> bool:
        """Return True if attention kernels draw their own dropout masks on `device`."""
        dropout = self.compute.dropout
        return dropout == "fused" or (dropout is None and accelerator().holds(device))

    @property
    def own_loss(self) -> bool:
        """Return True if the user's loop computes the loss. Then `loss` replaces it in trials."""
        return self.loss is loss_of_outputs

    @property
    def model_example(self) -> ModelExample:
        """Return the example, with the settings to run the model and the loss on it."""
        return ModelExample(
            self.hints.example,
            self.loss,
            self.inputs,
            self.sample,
            self.compute.microbatch_size is not None,
            self.hints.stages,
            self.hints.tp_plan,
            PRECISIONS.get(self.precision or ""),
        )

    def __post_init__(self) -> None:
        # A numpy integer would end up in checkpoints, and would wrap around where seeds are mixed.
        object.__setattr__(self, "seed", int(self.seed))
        if self.precision not in (None, *PRECISIONS):
            raise TrainingError(
                f"There is no precision {self.precision!r}.", numbers="None, 'bf16', 'fp16'", hint="precision='bf16'"
            )
        check_inputs(self.inputs)


@dataclass(frozen=True)
class LastCheckpoint:
    """The last checkpoint that was written or read. path: None if there is none. tried: step of the last begun save."""

    path: Path | None = None
    step: int = 0
    tried: int = 0


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a Trainer's loop; see Trainer.

    saves_if_detached: the user gave no `checkpoints.every`, so only a detached cell saves. name: the name of the run.
    grad_norm_every: see Compute.
    """

    data: Any = None
    batch_size: int = 1
    clip_norm: float | None = None
    lr_schedule: Callable[[int], float] | None = None
    eval_data: Any = None
    eval_every: int | None = None
    saves_if_detached: bool = False
    name: str | None = None
    callbacks: tuple[Callable[[Any, dict[str, Any]], None], ...] = ()
    progress: bool = False
    grad_norm_every: int = 1
    loading: Loading = Loading()
    checkpoints: Checkpoints = Checkpoints()
    recovery: Recovery = Recovery()

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch from samples."""
        return self.loading.collate or default_collate

    def stream(self, axes: Axes, strategy: Strategy, seed: int, device: torch.device) -> Stream:
        """Open the data at its beginning, for a rank at this place. Collective: the ranks compare their data."""
        return open_stream(
            self.data,
            batch_size=self.batch_size,
            rank=axes.index("dp"),
            ranks=axes.size("dp"),
            speeds=strategy.replica_speeds,
            seed=seed,
            shuffle=self.loading.shuffle is not False,
            drop_last=self.loading.drop_last,
            collate=self.collate,
            workers=self.loading.workers,
            gather=partial(all_gather_objects, world_size=axes.mesh.size, device=device),
        )


OWN_LOOP = LoopSettings(loading=Loading(shuffle=False, collate=list), recovery=Recovery(on_oom="raise"))
"""The settings of a user's own loop over `job.batches`."""


def warn_without_effect(
    data: Any, loading: Loading, checkpoints: Checkpoints, eval_data: Any, eval_every: int | None
) -> None:
    """Warn of settings that have no effect together with the others. Raises TrainingError for a DataLoader."""
    refuse_loader(data)
    never = not (checkpoints.every or (checkpoints.every is None and DETACHED.get()))
    whole = "" if is_map_style(data) or not isinstance(data, Iterable) else why_whole(data)
    without = [
        (
            loading.shuffle is not None and not is_map_style(data),
            "shuffle= has no effect on data that can only be iterated: it comes in its own order",
        ),
        (
            bool(loading.workers) and bool(whole),
            f"workers= has no effect on data that is not split, because each step reads it: {whole}",
        ),
        (
            not loading.workers and bool(whole) and dist.is_initialized() and dist.get_world_size() > 1,
            f"every rank reads all of the data: {whole}",
        ),
        (eval_every is not None and eval_data is None, "eval_every= has no effect without eval_data="),
        *(
            (
                given is not None and never,
                f"{name}= of nbkit.Checkpoints has no effect without every=, except in a detached cell",
            )
            for name, given in (("path", checkpoints.path), ("keep", checkpoints.keep))
        ),
    ]
    for applies, message in without:
        if applies:
            warnings.warn(message, stacklevel=4)


def example_of(data: Any, collate: Callable[[list[Any]], Any], given: Any = None) -> Any:
    """Return `given`, or else two rows to run the model on; None if reading them would consume the data."""
    if given is not None:
        return given
    # If reading fails here, the training reports the error when it reads the data.
    with suppress(Exception), alike():
        if not is_map_style(data):
            shards = data_shards(data)
            return None if shards is None else collate(shards.first_samples(2).samples)
        if not len(data):
            return None
        return collate([data[i] for i in range(min(2, len(data)))])
    return None
