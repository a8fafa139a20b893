"""The specification of a cluster, which the notebook writes to disk and the parent and the ranks read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit.rank.world.world import Place
from nbkit.wire.processes import Process


@dataclass(frozen=True)
class RankPin:
    """env: set before anything starts. cores: to bind to, () for all. threads: for torch."""

    env: dict[str, str]
    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Spec:
    """folder: of the cluster; engine_file: the controller's connection file for engines, which may not exist yet.

    ttl: seconds without notebook and without a running cell after which the cluster ends. launcher: the notebook,
    whose end gives up a start. forked: ranks are forks of the parent; else each is started afresh. address, port: of
    the first generation's store, filled in by the parent.
    """

    name: str
    folder: str
    profile_dir: str
    engine_file: str
    backend: str
    device: str
    pins: tuple[RankPin, ...]
    ttl: float
    launcher: Process
    forked: bool
    address: str = "127.0.0.1"
    port: int = 0

    def place(self, rank: int) -> Place:
        return Place(
            rank=rank,
            world_size=len(self.pins),
            # One GPU is visible to each rank, as cuda:0, and code written for torchrun goes to cuda:LOCAL_RANK.
            # torchrun has the same way of pinning: --virtual-local-rank.
            local_rank=rank if self.device == "cpu" else 0,
            local_world_size=len(self.pins),
            device=self.device,
            backend=self.backend,
        )


def read(path: Path, **changes: Any) -> Spec:
    """The spec at `path`, with `changes`."""
    fields = {**json.loads(path.read_text()), **changes}
    pins = tuple(RankPin(pin["env"], tuple(pin["cores"]), pin["threads"]) for pin in fields.pop("pins"))
    return Spec(pins=pins, launcher=Process(**fields.pop("launcher")), **fields)
