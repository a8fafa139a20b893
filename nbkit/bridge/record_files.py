"""Send the record files of this rank's newest training in pieces, for a notebook that does not share the disk."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from nbkit.rank.train.control.active_job import newest
from nbkit.records.record_file import old_part, overview_of, rank_files

_PIECE = 1 << 20


def recorded(rank: int, file: str = "", offset: int = 0) -> dict[str, Any]:
    """{"run": directory of the newest run, "" for none}; with `file` also the bytes of it from `offset` on.

    file: "records", "old" (the part before the newest), "overview" or "plan". head: its first line, by which a reader
    sees that it was begun anew.
    """
    folder = getattr(newest(), "run_dir", None)
    if folder is None:
        return {"run": ""}
    answer: dict[str, Any] = {"run": str(folder)}
    path = _path(folder, rank, file) if file else None
    if path is None:
        return answer
    try:
        with path.open("rb") as read:
            head = read.readline()
            read.seek(offset)
            data = read.read(_PIECE)
    except FileNotFoundError:
        return answer
    return answer | {"head": head.decode(errors="replace"), "data": base64.b64encode(data).decode()}


def _path(folder: Path, rank: int, file: str) -> Path | None:
    if file == "plan":
        return folder / "telemetry" / "plan.jsonl"
    records = rank_files(folder).get(rank)
    places = {"old": old_part, "overview": overview_of}
    return places[file](records) if records is not None and file in places else records
