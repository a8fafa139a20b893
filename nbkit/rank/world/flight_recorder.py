"""Reads torch's flight recorder: the newest operations of each communicator, and whether the device has begun them.

nbkit's own records say which operations a rank has issued. For NCCL, the recorder also knows whether an operation waits
in its stream or has begun. It also sees groups that nbkit did not make.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from nbkit.rank import torch_private

_MOST = 4


def unfinished() -> tuple[str, ...]:
    """Return a text for each of the oldest operations that have not ended, at most a few; () on CPU ranks."""
    if torch_private.nccl_recorder is None:
        return ()
    try:
        recorded = json.loads(torch_private.nccl_recorder(includeCollectives=True, onlyActive=True))
    except (RuntimeError, ValueError, TypeError):  # the recorder is off, or this torch writes another format
        return ()
    return tuple(islice(_of(recorded), _MOST))


def _of(recorded: dict[str, Any]) -> Iterator[str]:
    ended = {name: int(one["last_completed_collective"]) for name, one in recorded.get("pg_status", {}).items()}
    for entry in recorded.get("entries", ()):
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        if entry["state"] != "completed" and (entry["is_p2p"] or number > ended.get(str(entry["pg_id"]), -1)):
            yield _said(entry, number)


def _said(entry: dict[str, Any], number: int) -> str:
    sizes = " ".join(str(tuple(size)) for size in entry["input_sizes"])
    group = " ".join(str(part) for part in dict.fromkeys(entry["process_group"]) if part)
    state = "has begun" if entry["state"] == "started" else "has not begun"
    return f"{entry['profiling_name']} #{number} of group {group}, {sizes}: {state}"
