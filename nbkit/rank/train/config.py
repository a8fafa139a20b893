"""The settings of a job beside its model, optimizer and strategy, and those of a Trainer's loop around it.

They are the same under every strategy, and frozen: another process can take them over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.data.batch import check_inputs
from nbkit.rank.data.data_rng import alike
from nbkit.rank.data.open_stream import open_stream, refuse_loader
from nbkit.rank.data.sample_rows import Sample
from nbkit.rank.data.split.data_shards import data_shards, why_whole
from nbkit.rank.data.stream import Stream, is_map_style
from nbkit.rank.device import accelerator
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.find_facts import ModelExample
from nbkit.rank.train import argument_checks
from nbkit.rank.train.checkpoint.retention import Asked
from nbkit.rank.train.control.active_job import DETACHED
from nbkit.rank.train.step.precision import PRECISIONS
from nbkit.strategy import Strategy

DROPOUTS = ("keyed", "fused")
"""Values of dropout= beside None. None: whatever is fastest on the device."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a job; see `prepare` for each. Raises TrainingError for a value that does not exist.

    sample: reads the rows on which the loss is examined; None: the rows of `example`.
    batch: rows of a global batch, if known beforehand.
    """

    loss: Loss
    seed: int = 0
    inputs: Sequence[str] | None = None
    precision: str | None = None
    microbatch_size: int | None = None
    example: Any = None
    stages: Sequence[str] | None = None
    tp_plan: Mapping[str, str] | None = None
    recompute: bool = False
    offload: str | None = None
    compile: bool | str = False
    dropout: str | None = None
    sample: Callable[[], Sample | None] | None = None
    batch: int | None = None

    def fuses_dropout(self, device: torch.device) -> bool:
        """Return True if attention kernels draw their own dropout masks on `device`."""
        return self.dropout == "fused" or (self.dropout is None and accelerator().holds(device))

    @property
    def model_example(self) -> ModelExample:
        """Return the example, and how the model and the loss run on it."""
        return ModelExample(
            self.example,
            self.loss,
            self.inputs,
            self.sample,
            self.microbatch_size is not None,
            self.stages,
            self.tp_plan,
            PRECISIONS.get(self.precision or ""),
        )

    def __post_init__(self) -> None:
        # A numpy integer would end up in checkpoints, and would wrap around where seeds are mixed.
        object.__setattr__(self, "seed", int(self.seed))
        if self.precision not in (None, *PRECISIONS):
            raise TrainingError(
                f"There is no precision {self.precision!r}.", numbers="None, 'bf16', 'fp16'", hint="precision=None"
            )
        if self.offload not in (None, "cpu"):
            raise TrainingError(
                f"There is no place {self.offload!r} for the optimizer's state.",
                numbers="None, 'cpu'",
                hint="offload='cpu'",
            )
        if self.dropout not in (None, *DROPOUTS):
            raise TrainingError(
                f"There is no dropout {self.dropout!r}.", numbers="None, 'keyed', 'fused'", hint="dropout='keyed'"
            )
        check_inputs(self.inputs)
        argument_checks.check_counts(microbatch_size=self.microbatch_size)


@dataclass(frozen=True)
class LastCheckpoint:
    """The last checkpoint that was written or read. path: None before the first. tried: step of the last save begun."""

    path: Path | None = None
    step: int = 0
    tried: int = 0


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a Trainer's loop; see Trainer for each.

    save_steps, save_seconds: save_every in steps or in seconds; at most one of them is set. saves_if_detached: the user
    gave no save_every, so that only a detached cell saves. name: the run's.
    """

    data: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    collate: Callable[[list[Any]], Any]
    clip_norm: float | None
    lr_schedule: Callable[[int], float] | None
    eval_data: Any
    eval_every: int | None
    save_steps: int | None
    save_seconds: float | None
    save_path: str | Path | None
    saves_if_detached: bool
    keep: Asked
    snapshot_every: int | None
    name: str | None
    callbacks: tuple[Callable[[Any, dict[str, Any]], None], ...]
    log_every: int
    backup_every: int | None
    progress: bool
    on_failure: str
    hang_timeout: float | None
    on_oom: str | None
    balance: bool
    workers: int

    def stream(self, axes: Axes, strategy: Strategy, seed: int, device: torch.device) -> Stream:
        """Open the data at its beginning, as a rank at this place reads it. Collective: ranks compare their data."""
        return open_stream(
            self.data,
            batch_size=self.batch_size,
            rank=axes.index("dp"),
            ranks=axes.size("dp"),
            speeds=strategy.replica_speeds,
            seed=seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            collate=self.collate,
            workers=self.workers,
            gather=partial(all_gather_objects, world_size=axes.mesh.size, device=device),
        )


OWN_LOOP = LoopSettings(
    data=None,
    batch_size=1,
    shuffle=False,
    drop_last=False,
    collate=list,
    clip_norm=None,
    lr_schedule=None,
    eval_data=None,
    eval_every=None,
    save_steps=None,
    save_seconds=None,
    save_path=None,
    saves_if_detached=False,
    keep=None,
    snapshot_every=None,
    name=None,
    callbacks=(),
    log_every=1,
    backup_every=None,
    progress=False,
    on_failure="replace",
    hang_timeout=None,
    on_oom="raise",
    balance=False,
    workers=0,
)
"""Settings of a loop that the user writes over `job.batches`."""


def warn_without_effect(
    data: Any,
    shuffle: bool | None,
    eval_data: Any,
    eval_every: int | None,
    save_every: int | str | bool | None,
    save_path: Any,
    keep: Asked,
    workers: int = 0,
) -> None:
    """Warn of every setting of a Trainer that has no effect given the others. Raises TrainingError for a DataLoader."""
    refuse_loader(data)
    never = not (save_every or (save_every is None and DETACHED.get()))
    whole = "" if is_map_style(data) or not isinstance(data, Iterable) else why_whole(data)
    without = [
        (
            shuffle is not None and not is_map_style(data),
            "shuffle= has no effect on data that can only be iterated: it comes in its own order",
        ),
        (
            bool(workers) and bool(whole),
            f"workers= has no effect on data that is not split, which is read in the step: {whole}",
        ),
        (
            not workers and bool(whole) and dist.is_initialized() and dist.get_world_size() > 1,
            f"every rank reads all of the data: {whole}",
        ),
        (eval_every is not None and eval_data is None, "eval_every= has no effect without eval_data="),
        *(
            (given is not None and never, f"{name}= has no effect without save_every=, except in a detached cell")
            for name, given in (("save_path", save_path), ("keep", keep))
        ),
    ]
    for applies, message in without:
        if applies:
            warnings.warn(message, stacklevel=4)


def example_of(data: Any, collate: Callable[[list[Any]], Any], given: Any = None) -> Any:
    """Return `given`, or two rows to run the model on; None if reading them would use up the data."""
    if given is not None:
        return given
    # An error of the data is reported in full when it is read to train.
    with suppress(Exception), alike():
        if not is_map_style(data):
            shards = data_shards(data)
            return None if shards is None else collate(shards.first_samples(2).samples)
        if not len(data):
            return None
        return collate([data[i] for i in range(min(2, len(data)))])
    return None
