"""Compare a switch of half a gigabyte of state with a save and a load by torch.distributed.checkpoint.

Both begin with the old job and end with the new one, ready to step. They run in the same processes, one after the
other. The files are in memory (/dev/shm), and torch's own planners write and read them. The time to build the new model
counts for both.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

from bench.rigs.forked import Ranks
from bench.rigs.formulas import Model
from bench.settings import Settings
from bench.stats import ratio
from bench.table import Row, skipped

RANKS = 4
ROUNDS = 3
SIZE = {"width": 640, "layers": 9, "vocab": 1536, "block": 16, "batch": 8}  # 46 million parameters
QUICK = {"width": 64, "layers": 8, "vocab": 256, "block": 16, "batch": 8}
TOUR = ("zero3", "tp", "pp", "dp=2 pp=2", "zero3", "ddp")
"""Each switch goes from one to the next. ddp is the last: nothing would have to move from there."""
BAR_MOVE, BAR_WHOLE, BAR_BYTES = 1 / 4, 1 / 2, 64 << 20


def run(settings: Settings) -> list[Row]:
    """Return three rows: the movement, the whole switch, and the memory that it takes."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        return [skipped("switch of half a gigabyte", "torch.distributed.checkpoint", "no /dev/shm here")]
    folder = Path(mkdtemp(prefix="nbkit-bench-", dir=memory))
    try:
        size = QUICK if settings.quick else SIZE
        return _rows(f"{12 * Model(**size).parameters / 2**20:.0f} MiB", *_measured(settings, str(folder), size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(settings: Settings, folder: str, size: dict[str, int]) -> tuple[list[dict[str, float]], list[float]]:
    """Return (seconds of each transition, bytes that the fullest rank took beyond the new model)."""
    found, extra = [], []
    with Ranks("switch.switch", RANKS, folder=settings.folder, **size) as ranks:
        for number in range(1 + (1 if settings.quick else settings.count(ROUNDS))):
            ranks.ask("switch", strategy=TOUR[0])
            for strategy in TOUR[1:]:
                saved = max(ranks.ask("save", path=folder))
                said = ranks.ask("switch", strategy=strategy)
                loaded = ranks.ask("load", path=folder)
                if not all(same for _, same in loaded):
                    raise RuntimeError(f"{strategy}: what was loaded is not what was moved")
                if number == 0:
                    continue  # the first round creates groups, buffers and files
                pause = max(one["pause"] for one in said)
                build = max(one["prepare"] for one in said)
                stored = saved + max(seconds for seconds, _ in loaded)
                found.append({"pause": pause, "build": build, "move": pause - build, "stored": stored})
                extra.append(max(one["extra"] - one["holds"] for one in said))
    return found, extra


def _rows(size: str, found: list[dict[str, float]], extra: list[float]) -> list[Row]:
    def row(what: str, ours: list[float], theirs: list[float], bar: float) -> Row:
        figure = ratio(ours, theirs)
        return Row(
            f"{what}, {size} of weights and moments, {RANKS} ranks, {len(ours)} switches that move bytes",
            f"{sorted(ours)[len(ours) // 2]:.3g} s",
            f"torch.distributed.checkpoint through /dev/shm {sorted(theirs)[len(theirs) // 2]:.3g} s",
            f"{figure.middle:.3f} [{figure.low:.3f}, {figure.high:.3f}]",
            "",
            f"≤ {bar:g} x (median)",
            figure.middle <= bar,
            {"nbkit": ours, "checkpoint": theirs},
        )

    moved = row("movement", [one["move"] for one in found], [one["stored"] for one in found], BAR_MOVE)
    whole = [one["stored"] + one["build"] for one in found]
    switched = row("whole switch", [one["pause"] for one in found], whole, BAR_WHOLE)
    most = max(extra)
    return [
        moved,
        switched,
        Row(
            "the same: memory at the peak beyond the new model, fullest rank",
            f"{most / 2**20:.0f} MB",
            "",
            "",
            "",
            f"≤ {BAR_BYTES >> 20} MB",
            most <= BAR_BYTES,
            {"bytes": extra},
        ),
    ]
