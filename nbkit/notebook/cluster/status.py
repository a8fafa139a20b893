"""The tables of `%cluster status` and `%cluster list`: text in a terminal, HTML in a notebook."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from nbkit.durations import text_of
from nbkit.figures import html_table
from nbkit.notebook.cluster.machine.gpus import find_gpus
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.wire.cells import first_line
from nbkit.wire.messages import Death

COLUMNS = ("rank", "pid", "device", "memory", "state", "cell", "age")


@dataclass(frozen=True)
class RankRow:
    """A rank's row in the status table.

    memory: used and total, "1.2 / 23.9 GiB"; see `memory_by_rank`. age: seconds since its cell began.
    """

    rank: int
    pid: int
    device: str
    memory: str
    state: str
    cell: str
    age: float
    why: str

    def cells(self) -> tuple[str, ...]:
        age = f"{self.age:.0f} s" if self.age else ""
        return str(self.rank), str(self.pid), self.device, self.memory, self.state, self.cell, age


@dataclass(frozen=True)
class Status:
    """The ranks of a cluster at one moment."""

    entry: ClusterEntry
    rows: Sequence[RankRow]
    generation: int
    notes: Sequence[str] = ()

    def _title(self) -> str:
        entry = self.entry
        return f"cluster {entry.name}: {entry.n} ranks over {entry.backend}, generation {self.generation}"

    def _footer(self) -> list[str]:
        return [*self.notes, *self._reserve(), f"logs and output: {self.entry.folder}"]

    def _reserve(self) -> list[str]:
        asked: Any = self.entry.options.get("spares")
        if asked and self.entry.is_spread:
            asked = f"{asked} on each host"
        return [f"spares: {', '.join(self.entry.spares) or f'none is left of {asked}'}"] if asked else []

    def as_json(self) -> dict[str, Any]:
        """Return {"name", "ranks": [...], "backend", "generation", "host", "folder", "spares", "notes"}.

        An element of ranks has the fields of RankRow. folder: contains logs and output. spares: devices in reserve.
        """
        entry = self.entry
        told = {name: getattr(entry, name) for name in ("name", "backend", "host", "folder", "spares")}
        return {**told, "ranks": self.rows, "generation": self.generation, "notes": self.notes}

    def __repr__(self) -> str:
        table = text_table(COLUMNS, [row.cells() for row in self.rows])
        reasons = [f"rank {row.rank} is on {row.why}" for row in self.rows]
        return "\n".join((self._title(), table, *reasons, *self._footer()))

    def _repr_html_(self) -> str:
        table = html_table(COLUMNS, [row.cells() for row in self.rows], [row.why for row in self.rows])
        footer = "<br>".join(html.escape(line) for line in self._footer())
        return f"<b>{html.escape(self._title())}</b>{table}<small>{footer}</small>"


@dataclass(frozen=True)
class ClusterList:
    """The clusters of this user. unreadable: a line about each cluster that another release of nbkit has started."""

    entries: Sequence[ClusterEntry]
    unreadable: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return {"clusters": [{"name", "ranks", "backend", "state", "age", "ttl", "host", "devices"}, ...]}.

        ranks: their number. state: "ended" if its processes are gone; then `nbkit clean` removes it. age, ttl: seconds.
        devices: one for each rank. The key "unreadable" has a line about each cluster of another release.
        """
        return {
            "clusters": [
                {
                    **{name: getattr(entry, name) for name in ("name", "backend", "ttl", "host")},
                    "ranks": entry.n,
                    "state": entry.state if entry.is_alive() else "ended",
                    "age": time.time() - entry.born,
                    "devices": entry.labels,
                }
                for entry in self.entries
            ],
            "unreadable": self.unreadable,
        }

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for entry in self.entries:
            state = entry.state if entry.is_alive() else "ended (%cluster clean)"
            ttl = f"{text_of(entry.ttl)} without notebook and cell"
            rows.append(
                (entry.name, str(entry.n), entry.host, state, f"{(time.time() - entry.born) / 60:.0f} min", ttl)
            )
        return rows

    _columns = ("name", "ranks", "host", "state", "age", "lets go after")

    def __iter__(self) -> Any:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        none = () if self.unreadable else ("no clusters; %cluster start -n 2 makes one",)
        return "\n".join((*((text_table(self._columns, self._rows()),) if self.entries else none), *self.unreadable))

    def _repr_html_(self) -> str:
        if not self.entries:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return html_table(self._columns, self._rows()) + "".join(
            f"<pre>{html.escape(said)}</pre>" for said in self.unreadable
        )


def rank_rows(entry: ClusterEntry, answers: Mapping[int, dict[str, Any]], deaths: Mapping[int, Death]) -> list[RankRow]:
    """Return one row for each rank. answers: rank -> its answer to GetStatus. A row says if the answer is missing."""
    memory = memory_by_rank(entry, answers)
    rows = []
    for rank in range(entry.n):
        state, cell, age = "does not answer", "", 0.0
        if rank in deaths:
            state = f"dead ({deaths[rank].how})"
        elif (answer := answers.get(rank)) is not None:
            cell = f"[{answer['number']}] {first_line(answer['source'])}" if answer["cell"] else ""
            state, age = _state(answer), answer["age"]
        held = memory.get(rank, "") if rank not in deaths else ""
        label, why = entry.labels[rank], entry.reasons[rank]
        rows.append(RankRow(rank, entry.ranks[rank].pid, label, held, state, cell, age, why))
    return rows


def _state(answer: dict[str, Any]) -> str:
    if answer["training"]:
        progress = answer["progress"]
        return f"training, step {progress.get('step', 0)}" + f", {progress.get('waits')}" * bool(progress.get("waits"))
    if answer["cell"]:
        return f"running ({answer['where']})" if answer["where"] else "running"
    return "idle, world spoilt" if answer["dirty"] else "idle"


def memory_by_rank(entry: ClusterEntry, answers: Mapping[int, dict[str, Any]]) -> dict[int, str]:
    """Return {rank: "used / total"}: of its GPU, from the driver; of a CPU rank, its own and the machine's."""
    if entry.backend == "gloo" and not any(label.startswith("GPU") for label in entry.labels):
        total = psutil.virtual_memory().total
        return {rank: _of(answer["memory"], total) for rank, answer in answers.items()}
    by_label = {f"GPU {gpu.number} {gpu.name}": gpu for gpu in find_gpus()}
    found = {rank: by_label.get(label) for rank, label in enumerate(entry.labels)}
    return {
        rank: _of((gpu.used_mib or 0) << 20, (gpu.total_mib or 0) << 20)
        for rank, gpu in found.items()
        if gpu is not None
    }


def _of(used: int, total: int) -> str:
    return f"{used / 2**30:.2f} / {total / 2**30:.1f} GiB"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as text, with columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
    return "\n".join(lines)
