"""What a notebook hears of the end of its cluster while it comes: why, and whether a training has still to be saved."""

from __future__ import annotations

from collections.abc import Collection

from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.registry import Entry
from nbkit.wire import cluster_end


class EndNews:
    """One per connection. Looked at every second."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._said, self._looks = "", 0

    def say(self, cells: Collection[Execution]) -> None:
        """Say to the cells that run why the cluster ends, before it does; once for each reason."""
        end = cluster_end.read(self._entry.folder)
        if cells and end is not None and end.step < 0 and end.why != self._said:
            self._said = end.why
            for execution in cells:
                execution.say(f"{end.why}: a training ends at its next step boundary, and is saved.")

    def still_ends(self) -> bool:
        """Whether ranks of a cluster that is gone live, and have still to end a training."""
        self._looks += 1
        if self._entry.is_spread and self._entry.controller.is_alive() and not registry.how_ended(self._entry):
            return True  # its coordinator was killed: its ranks, on other hosts, hear of it, and answer
        if not any(process.is_alive() for process in self._entry.ranks):
            return False
        # What a rank writes of it may come a moment after the end that it hears of.
        return cluster_end.read(self._entry.folder) is not None or self._looks < 2
