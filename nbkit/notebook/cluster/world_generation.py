"""The generation of the ranks' world: all process groups of one set of ranks.

A world is spoilt (it cannot be used any more) when a rank was interrupted in a collective, when a rank died, or when
ranks issued different collectives, because the next ones would not match. The next cell then forms a new generation
first, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.records.run_advice import differences


def form(client: Client, n: int, generation: int) -> None:
    """Form this generation of the world on all `n` ranks. Raises the error of a rank."""
    address, port = client.call_and_wait([0], "nbkit.bridge.calls:open_store", timeout=10)[0]
    client.call_and_wait(range(n), "nbkit.bridge.calls:reform", generation, address, port, timeout=90)


class WorldGeneration:
    """The state of a cluster's world. spoilt: why the next cell needs a new generation, "" if it does not."""

    def __init__(self, client: Client, n: int) -> None:
        self._client, self._n = client, n
        self.number = 1
        self.spoilt = ""
        self.counts: dict[int, Mapping[str, int]] = {}

    def resized(self, n: int) -> None:
        """Record that the world has been formed with `n` ranks."""
        self._n = n
        self.counts.clear()

    def spoil(self, why: str) -> None:
        self.spoilt = self.spoilt or why

    def learn(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Update from the ranks' answers to GetStatus."""
        self.number = max((state["generation"] for state in states.values()), default=1)
        for state in states.values():
            if state["dirty"]:
                self.spoil(state["dirty"])

    def learn_from(self, cell: Execution) -> None:
        """Update from the records of a cell that has ended."""
        for rank, record in cell.records.items():
            self.counts[rank] = record.counts
            self.number = max(self.number, record.generation)
            if record.dirty:
                self.spoil(record.dirty)
        failed = cell.deaths or any(record.failure for record in cell.records.values())
        if failed and not self.spoilt:
            counts = [self.counts.get(rank, {}) for rank in range(self._n)]
            if unequal := differences(counts):
                self.spoil(f"cell {cell.request.number} left the ranks at different operations ({unequal[0]})")

    def ensure(self, deaths: Collection[int]) -> str:
        """Form a new generation if this one is spoilt and no rank has died. Return a text for the user, or ""."""
        if not self.spoilt or deaths:
            return ""  # after a death, the other ranks can run cells, but they cannot form a world
        client, why = self._client, self.spoilt
        # Increment first: after a failure, some ranks are already in this generation and accept only a later one.
        self.number += 1
        try:
            form(client, self._n, self.number)
        except Exception as error:
            raise ClusterError(
                "A new generation of the world could not be formed.",
                numbers=f"the old one is spoilt: {why}; now: {str(error).strip().splitlines()[-1][:200]}",
                hint="run the cell again to try once more; or %cluster restart   (variables of all ranks are lost)",
            ) from None
        self.spoilt = ""
        self.counts.clear()
        return f"The world was formed anew (generation {self.number}): {why}. Variables, models and groups live on."
