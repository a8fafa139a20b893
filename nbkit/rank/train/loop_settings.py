"""The settings of a Trainer's loop, which are none of its job's: one value, which another process can take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
