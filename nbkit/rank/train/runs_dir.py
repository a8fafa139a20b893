"""Read the default directory of runs and its limit on disk (`runs` and `max_disk` of nbkit.toml), and check the limit.

A cluster passes both to its ranks as environment variables, so that they are set before any import.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from nbkit.errors import TrainingError
from nbkit.quoting import shell_words

DEFAULT = os.environ.get("NBKIT_RUNS") or "runs"
MAX_BYTES = int(os.environ.get("NBKIT_MAX_DISK") or 0)  # 0: no limit

_LISTED = 3
_ABOUT = "run.json"


def note_name(run_dir: Path, name: str | None) -> None:
    """Write the user's `name` of a run into its directory. The name of the directory can be different."""
    (run_dir / _ABOUT).write_text(json.dumps({"name": name}) + "\n", encoding="utf-8")


def runs_named(runs: Path, name: str) -> list[Path]:
    """Return the directories in `runs` that belong to runs with exactly this `name`."""
    return [folder for folder in runs.iterdir() if _name_in(folder) == name] if runs.is_dir() else []


def _name_in(run_dir: Path) -> str | None:
    try:
        found = json.loads((run_dir / _ABOUT).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):  # not a run, or a run of an older release
        return None
    return found if isinstance(found, str) else None


def check_room(runs: Path, to: Path, what: str, *, run: str = "") -> None:
    """Raise TrainingError, on every rank, if the files in `runs` have reached max_disk bytes. Collective.

    runs: an absolute path. to: the path to write to; paths outside of `runs` have no limit. what: the refused action,
    in words. run: the current run, which the hint must not suggest to delete.
    """
    if not MAX_BYTES:
        return
    several = dist.is_initialized() and dist.get_world_size() > 1
    asked = (not several or dist.get_rank() == 0) and to.absolute().is_relative_to(runs)
    told = [_full(runs, what, run) if asked else None]
    if several:
        dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise told[0]


def _full(runs: Path, what: str, run: str) -> TrainingError | None:
    held: Counter[str] = Counter()
    for folder, _, names in os.walk(runs):
        first = Path(folder).relative_to(runs).parts[:1]
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                held["".join(first) or name] += (Path(folder) / name).lstat().st_size
    if held.total() < MAX_BYTES:
        return None
    largest = ", ".join(f"{name} {_text(size)}" for name, size in held.most_common(_LISTED))
    old = next((name for name, _ in held.most_common() if name != run), None)
    return TrainingError(
        f"The folder of runs is full: {what}.",
        numbers=f"{_text(held.total())} in {runs}, max_disk is {_text(MAX_BYTES)}; the largest: {largest}",
        hint=f"!{shell_words('rm', '-r', runs / old)}   if you no longer need it"
        if old and str(runs / old).isprintable()
        else f"trainer.save(...)   with a path outside of {runs}",
    )


def _text(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
