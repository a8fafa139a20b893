"""Functions that the notebook calls on a rank by name, in its main thread. See nbkit/wire/remote.py."""

from __future__ import annotations

import os
import socket
from typing import Any

from nbkit.bridge.runner import Runner
from nbkit.errors import ClusterError
from nbkit.rank.world import world
from nbkit.wire.cells import CellRecord, CellRequest

runner: Runner | None = None  # set once, by the engine
dead: set[int] = set()  # ranks of this cluster that have died; only a restart brings them back
_listener: socket.socket | None = None


def hello() -> dict[str, Any]:
    """Proof that this rank runs code and has a world."""
    here = world.current()
    assert here is not None
    return {"pid": os.getpid(), "rank": here.place.rank, "generation": here.generation}


def run_cell(request: CellRequest) -> CellRecord:
    assert runner is not None
    return runner.run(request)


def open_store() -> int:
    """On rank 0, before a new generation: listen for its store, on loopback. Returns the port."""
    global _listener
    _listener = world.open_listener()
    return int(_listener.getsockname()[1])


def reform(generation: int, address: str, port: int) -> int:
    """Join generation `generation` of the world, whose store is at address:port. Returns it."""
    global _listener
    here = world.current()
    assert here is not None
    if dead:
        raise ClusterError(f"Rank {min(dead)} has died, and a world has all ranks.", hint="%cluster restart")
    listener, _listener = (_listener, None) if here.place.rank == 0 else (None, _listener)
    here.reform(generation, listen=listener, address=address, port=port)
    return here.generation
