"""Tell ipyparallel's hub that an engine is gone, as its own nanny process would (ipyparallel/engine/nanny.py)."""

from __future__ import annotations

import json
from pathlib import Path

import zmq
from jupyter_client.session import Session


def unregister(engine_file: Path, rank: int) -> None:
    """Have the hub forget engine `rank`, so that its clients learn of it and the id is free again."""
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
