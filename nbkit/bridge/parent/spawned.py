"""A rank started afresh instead of forked, for systems where a process with torch in it must not be forked."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from nbkit.wire.own_modules import OWN_MODULES

_started: list[subprocess.Popen[bytes]] = []  # kept, or subprocess would reap them before the parent does


def start(
    folder: Path, port: int, rank: int, line: socket.socket, listener: socket.socket | None, *, replaces: bool
) -> int:
    """Start rank `rank` in its own session. It inherits its end of the line. Returns its pid."""
    fds = [line.fileno()] + ([listener.fileno()] if listener else [])
    process = subprocess.Popen(
        [sys.executable, *OWN_MODULES, __name__, str(folder), str(port), str(rank), str(int(replaces)), *map(str, fds)],
        pass_fds=fds,
        start_new_session=True,
    )
    _started.append(process)
    return process.pid


def main() -> None:
    from nbkit.bridge import engine
    from nbkit.bridge.parent import spec
    from nbkit.wire.link import Link

    folder, port, rank, replaces, line, *listener = sys.argv[1:]
    engine.main(
        spec.read(Path(folder) / "spec.json", port=int(port)),
        int(rank),
        socket.socket(fileno=int(listener[0])) if listener else None,
        Link(socket.socket(fileno=int(line))),
        replaces=bool(int(replaces)),
    )


if __name__ == "__main__":
    main()
