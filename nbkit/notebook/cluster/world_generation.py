"""The generation of the ranks' world, as the notebook knows it: when it is spoilt, and how a new one is formed.

A world is spoilt when a rank was broken out of a collective, when a rank died, or when ranks have issued different
collectives (the next one would meet the wrong partner). The next cell then first forms a new generation, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.records.run_advice import differences


def form(client: Client, n: int, generation: int) -> None:
    """Have all `n` ranks form this generation of their world. Raises what a rank raised."""
    address, port = client.call_and_wait([0], "nbkit.bridge.calls:open_store", timeout=10)[0]
    client.call_and_wait(range(n), "nbkit.bridge.calls:reform", generation, address, port, timeout=90)


class WorldGeneration:
    """State of one cluster's world. spoilt: why the next cell needs a new generation, "" if it does not."""

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
        """Take over what the ranks answer to "status"."""
        self.number = max((state["generation"] for state in states.values()), default=1)
        for state in states.values():
            if state["dirty"]:
                self.spoil(state["dirty"])

    def learn_from(self, cell: Execution) -> None:
        """Take over the records of a cell that has ended."""
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
        """Form a new generation if this one is spoilt and no rank has died. Return what to tell the user, or ""."""
        if not self.spoilt or deaths:
            return ""  # ranks that are left can run cells, but a world has all of them
        client, why = self._client, self.spoilt
        # Counted before it is tried: ranks that got half-way are in this generation and take only a later one.
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
