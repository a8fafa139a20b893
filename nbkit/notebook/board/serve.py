"""Run TensorBoard as its own process: `python -m nbkit.notebook.board.serve PARENT_PID LOGDIR`.

Only TensorBoard's own plugins and nbkit's are loaded, because TensorBoard does not start if a third-party plugin cannot
be imported. The process takes a free port, writes its address as the first line of stdout, and ends when its parent
ends.

A script is added to TensorBoard's page. It presses the reload button, so that TensorBoard's own tabs follow a training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

WATCH_SECONDS = 0.5


def main(parent: int, logdir: str) -> None:
    """Serve until the parent has ended."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    from tensorboard import default, program

    from nbkit.notebook.board.plugin.plugin import CommunicationPlugin

    def server(app: Any, flags: Any) -> Any:
        return program.create_port_scanning_werkzeug_server(following(app), flags)

    board = program.TensorBoard(plugins=[*default.get_static_plugins(), CommunicationPlugin], server_class=server)
    board.configure(
        logdir=logdir,
        host="127.0.0.1",
        port=0,
        reload_interval=1.0,
        reload_multifile=True,
        window_title="TensorBoard · nbkit",
    )
    print(board.launch(), flush=True)
    # Nobody reads the pipe any more, so later output goes to the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        time.sleep(3600)


def _end_with(parent: int) -> None:
    # Poll, because PR_SET_PDEATHSIG follows the *thread* that started this process, and a notebook's threads end early.
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(0)


_SCRIPT = b'<script type="module" src="data/plugin/communication/static/live.js"></script>'
_PAGES = ("", "/", "/index.html")

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def following(app: App) -> App:
    """Return `app` with the script added to its first page. A page of unexpected form stays unchanged."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO", "") not in _PAGES or environ.get("REQUEST_METHOD") != "GET":
            return app(environ, start_response)
        begun: list[Any] = []

        def hold(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            begun[:] = [status, headers, *rest]
            return lambda data: None

        # Request an uncompressed page, to change it.
        parts = app({**environ, "HTTP_ACCEPT_ENCODING": "identity"}, hold)
        page = b"".join(parts)
        if callable(close := getattr(parts, "close", None)):
            close()
        status, headers, *rest = begun
        page = page.replace(b"</body>", _SCRIPT + b"</body>", 1)
        length = [("Content-Length", str(len(page)))]
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, kept + length, *rest)
        return [page]

    return answer


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
