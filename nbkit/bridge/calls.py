"""Functions that the notebook calls on a rank by name, in its main thread. See nbkit/wire/rank_functions.py."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict
from typing import Any

from nbkit.bridge.runner import Runner
from nbkit.errors import ClusterError
from nbkit.rank.world import world
from nbkit.rank.world.rank_place import Place
from nbkit.rank.world.source_filter import admit_only
from nbkit.wire.cells import CellRecord, CellRequest
from nbkit.wire.processes import Process

runner: Runner | None = None  # these four are set once, by the engine
place: Place | None = None
address = ""  # of this host, where its ranks may listen
hosts: tuple[str, ...] = ()  # every address of every host of the cluster; () where there is this one alone
dead: set[int] = set()  # ranks of this cluster that have died; only a restart brings them back
_listener: socket.socket | None = None


def hello() -> dict[str, Any]:
    """Proof that this rank runs code, and where; generation 0 says that it has no world yet."""
    assert place is not None
    here = world.current()
    process = asdict(Process.of(os.getpid()))
    return {"process": process, "rank": place.rank, "generation": here.generation if here else 0}


def run_cell(request: CellRequest) -> CellRecord:
    assert runner is not None
    return runner.run(request)


def open_store() -> tuple[str, int]:
    """On rank 0, before a new generation: listen for its store. Returns address and port; all ranks reach them."""
    global _listener
    _listener = world.open_listener(address)
    if hosts and not admit_only(_listener, hosts):
        print("The store of the world is open to other hosts too: no filter on sockets here.", file=sys.__stderr__)
    return address, int(_listener.getsockname()[1])


def take_listener() -> socket.socket | None:
    """What `open_store` has opened, for who serves the store in it."""
    global _listener
    listener, _listener = _listener, None
    return listener


def reform(generation: int, address: str, port: int) -> int:
    """Join generation `generation` of the world, whose store is at address:port. Returns it."""
    assert place is not None
    if dead:
        raise ClusterError(f"Rank {min(dead)} has died, and a world has all ranks.", hint="%cluster restart")
    listener = take_listener() if place.rank == 0 else None
    if (here := world.current()) is None:
        world.World.join(place, listen=listener, address=address, port=port, generation=generation)
    else:
        here.reform(generation, listen=listener, address=address, port=port)
    return generation
