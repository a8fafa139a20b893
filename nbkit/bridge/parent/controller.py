"""The controller of ipyparallel's, as the parent of the ranks sees it: a process that the notebook started."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from nbkit.wire.processes import Process, followers


def controller_of(folder: Path) -> Process | None:
    """The controller of the cluster in `folder`; None until the notebook has started it and said so."""
    try:
        return Process(**json.loads((folder / "controller.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return None


def end_schedulers(folder: Path, controller: Process | None) -> None:
    """End what a controller that was killed has left. One that lives ends its schedulers itself."""
    if controller and not controller.is_alive():
        for scheduler in followers(controller.pid, folder):
            scheduler.end(signal.SIGKILL)


def unregister(engine_file: Path, rank: int) -> None:
    """Have the hub forget engine `rank`, so that its clients learn of it and the id is free again.

    As its own nanny process would (ipyparallel/engine/nanny.py). For a process of its own: the parent is without zmq.
    """
    import zmq
    from jupyter_client.session import Session

    info = json.loads(engine_file.read_text())
    session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
    context = zmq.Context()  # type: ignore[attr-defined]
    socket = context.socket(zmq.DEALER)  # type: ignore[attr-defined]
    socket.LINGER = 3000
    if server := info.get("curve_serverkey"):
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"{info['interface']}:{info['registration']}")
    session.send(socket, "unregistration_request", content={"id": rank})
    socket.close()
    context.term()
