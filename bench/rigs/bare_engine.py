"""Engines that are only sockets, 128 in a process, for clusters whose light engines do not fit in memory.

python -m bench.rigs.bare_engine FOLDER NAME N CONTROLLER      as bench.rigs.light_engine

To the controller and the kernel they look like light engines: each registers, answers heartbeats and connects to every
scheduler. It receives and sends the same messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import types
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
from ipyparallel.serialize import serialize_object, unpack_apply_message
from jupyter_client.session import Session, utcnow

from bench.rigs.light_engine import answer, await_engine_file, end_with_input
from nbkit.wire.cells import SIGNATURES_KEPT

IN_A_PROCESS = 128


@dataclass(frozen=True)
class _Engine:
    rank: int
    name: str
    shell: zmq.Socket[bytes]
    ping: zmq.Socket[bytes]
    pong: zmq.Socket[bytes]
    others: tuple[zmq.Socket[bytes], ...]  # kept open; nothing arrives on them


def main(folder: Path, name: str, n: int, controller: int) -> None:
    """Fork processes of engines and wait for them. All end when standard input ends, that is, with the benchmark."""
    threading.Thread(target=end_with_input, args=(psutil.Process(controller),), daemon=True).start()
    engine_file = await_engine_file(folder, name)
    for first in range(0, n, IN_A_PROCESS):
        if os.fork() == 0:
            _Engines(json.loads(engine_file.read_text())).serve(range(first, min(n, first + IN_A_PROCESS)))
    with contextlib.suppress(KeyboardInterrupt, ChildProcessError):
        while os.wait():
            pass


class _Engines:
    """The engines of one process. info: the connection file that the controller has written for engines."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.session = Session(
            key=info["key"].encode(),
            packer=info["pack"],
            unpacker=info["unpack"],
            signature_scheme=info["signature_scheme"],
            digest_history_size=SIGNATURES_KEPT,
        )
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8 * IN_A_PROCESS)
        self.keys = zmq.curve_keypair()

    def serve(self, ranks: range) -> None:
        engines = [self._engine(rank) for rank in ranks]
        shells = {each.shell: each for each in engines}
        hearts = {each.ping: each.pong for each in engines}
        poller = zmq.Poller()
        for socket in (*shells, *hearts):
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket in hearts:
                    hearts[socket].send_multipart(socket.recv_multipart())
                else:
                    self._reply(shells[socket])

    def _engine(self, rank: int) -> _Engine:
        name = str(uuid.uuid4())
        registrar = self._socket(zmq.DEALER, name, self.info["registration"])
        self.session.send(registrar, "registration_request", content={"uuid": name, "id": rank})
        registrar.recv_multipart()
        shell = self._socket(zmq.ROUTER, name, self.info["mux"], self.info["task"], self.info["broadcast"][0])
        control = self._socket(zmq.ROUTER, name, self.info["control"])
        output = self._socket(zmq.PUB, name, self.info["iopub"])
        ping = self._socket(zmq.SUB, name, self.info["hb_ping"])
        ping.subscribe(b"")
        pong = self._socket(zmq.DEALER, name, self.info["hb_pong"])
        return _Engine(rank, name, shell, ping, pong, (registrar, control, output))

    def _socket(self, kind: int, name: str, *ports: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.identity = name.encode()
        socket.curve_serverkey = self.info["curve_serverkey"].encode()
        socket.curve_publickey, socket.curve_secretkey = self.keys
        for port in ports:
            socket.connect(f"{self.info['interface']}:{port}")
        return socket

    def _reply(self, engine: _Engine) -> None:
        started = utcnow()
        sender, frames = self.session.feed_identities(engine.shell.recv_multipart())
        message = self.session.deserialize(frames)
        calls = types.ModuleType("nbkit.bridge.calls")  # the function in the message imports this module
        calls.run_cell = lambda request: answer(engine.rank, request)  # type: ignore[attr-defined]
        calls.hello = lambda: engine.rank  # type: ignore[attr-defined]
        sys.modules["nbkit.bridge.calls"] = calls
        function, values, named = unpack_apply_message(message["buffers"], {})
        self.session.send(
            engine.shell,
            "apply_reply",
            {"status": "ok"},
            parent=message,
            ident=sender,
            buffers=serialize_object(function(*values, **named)),
            metadata={
                "started": started,
                "dependencies_met": True,
                "engine": engine.name,
                "is_broadcast": False,
                "is_coalescing": False,
                "original_msg_id": "",
                "label": None,
                "status": "ok",
            },
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
