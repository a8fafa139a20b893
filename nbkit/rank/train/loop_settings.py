"""The settings of a Trainer's loop, which are none of its job's: one value, which another process can take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit.rank.data.stream import Stream, open_stream
from nbkit.rank.parallel.device_mesh import Axes


@dataclass(frozen=True)
class LastCheckpoint:
    """The last checkpoint that was written or read; path: None before the first. unsaved_s: of training since."""

    path: Path | None = None
    step: int = 0
    unsaved_s: float = 0.0


@dataclass(frozen=True)
class LoopSettings:
    """See Trainer for what each means.

    save_steps, save_seconds: of save_every, which is one of them. saves_if_detached: nobody has said how often.
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
    callbacks: tuple[Callable[[Any, dict[str, Any]], None], ...]
    log_every: int
    backup_every: int | None
    progress: bool
    on_failure: str

    def stream(self, axes: Axes, seed: int) -> Stream:
        """The data from its beginning, as a rank at this place reads it. Collective: ranks compare what they hold."""
        return open_stream(
            self.data,
            batch_size=self.batch_size,
            rank=axes.index("dp"),
            ranks=axes.size("dp"),
            seed=seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            collate=self.collate,
        )
