"""A sink that writes a CSV file: a row for each step and for each other event."""

from __future__ import annotations

import csv
import os
from typing import IO, Any

from nbkit.quoting import user_path
from nbkit.sinks.told import line, numbers

COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "step_seconds"),
    *("memory_bytes", "memory_peak_bytes", "strategy", "event", "logged"),
)


class CSV:
    """Appends rows to the file `path`. `pandas.read_csv(path)` can read the file during the training.

    The columns are step, loss, lr, grad_norm, tokens_per_second, samples_per_second, step_seconds, memory_bytes,
    memory_peak_bytes, strategy, event and logged. If a row is not a step, `event` says what happened. `logged` has the
    values that your own loop logs, as "name=value". Each row is in the file as soon as it is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        self._file: IO[str] | None = None

    def open(self, run: dict[str, Any]) -> None:
        """Open the file. The first line of a new file has the names of the columns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        if not self._file.tell():
            self._rows.writeheader()

    def write(self, event: dict[str, Any]) -> None:
        """Write the row of an event."""
        assert self._file is not None
        found = numbers(event)
        logged = " ".join(f"{name}={value:.6g}" for name, value in found.items() if name not in COLUMNS)
        more = {"step": event["step"], "strategy": event.get("strategy", ""), "event": line(event), "logged": logged}
        self._rows.writerow({**found, **more})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
