"""The parent of a cluster's ranks, and its controller, forked from the process that ranks of tests are forked from.

That process has torch and ipyparallel in memory; importing them takes seconds of a core for each cluster. Ranks are
given facts about optimizers and links that they would otherwise measure at the first job and after each death. All
else is as for a user: their own session, environment, folder and log. tests/notebook/cluster/test_launch.py starts
clusters as a user does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socketserver
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process as processes
from pathlib import Path
from typing import Any

import pytest
import ranks
from ipyparallel.cluster.launcher import LocalControllerLauncher

from nbkit.notebook.cluster.launch.launch import ParentLauncher

# Other processes ask the tests' process to fork, because their own fork would have to import everything.
_ASK = """
def start(launcher):
    import json, os, socket

    environment = {{**os.environ, **launcher.get_env()}}
    with socket.socket(socket.AF_UNIX) as asking, asking.makefile("rw") as lines:
        asking.connect({address!r})
        how = [launcher.args, environment, launcher.work_dir, launcher.output_file]
        print(json.dumps(how), file=lines, flush=True)
        launcher.pid = int(lines.readline())
"""
_PROGRAM = """{ask}
from nbkit.notebook.cluster.launch.launch import LocalControllerLauncher, ParentLauncher

ParentLauncher.start = LocalControllerLauncher.start = start
"""
# Each kernel runs this at its start. A cell still imports nbkit, as for a user.
_STARTUP = """
def prepare():
    import sys
    {ask}
    def before_a_cell(*_):
        if "nbkit" in sys.modules:
            from nbkit.notebook.cluster.launch.launch import LocalControllerLauncher, ParentLauncher

            ParentLauncher.start = LocalControllerLauncher.start = start
            events.unregister("pre_run_cell", before_a_cell)

    events = get_ipython().events
    events.register("pre_run_cell", before_a_cell)

prepare()
del prepare
"""


@contextmanager
def forked_parents(forked: bool = True, *, controllers: bool = True) -> Iterator[None]:
    """Fork the parents of clusters that this process starts inside; with `forked=False`, start them as usual.

    controllers: False if a test kills a controller. Its processes are then found by their environment, and a forked
    process shows that of the tests' process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParentLauncher, "start", _start if forked else _AS_EVER)
        patch.setattr(LocalControllerLauncher, "start", _start if forked and controllers else _CONTROLLER_AS_EVER)
        yield


_AS_EVER, _CONTROLLER_AS_EVER = ParentLauncher.start, LocalControllerLauncher.start


@contextmanager
def forked_parents_of_kernels(ipython_dir: Path) -> Iterator[None]:
    """Fork the parents of clusters that kernels with this IPYTHONDIR start inside."""
    with _served() as ask:
        startup = ipython_dir / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00-forked-parents.py").write_text(_STARTUP.format(ask=textwrap.indent(ask, "    ")))
        yield


@contextmanager
def forked_parents_of_programs() -> Iterator[str]:
    """Yield source for a program: if it runs that first, the parents of its clusters are forked."""
    with _served() as ask:
        yield _PROGRAM.format(ask=ask)


@contextmanager
def _served() -> Iterator[str]:
    """Yield the source of a function that starts the parent of a launcher by asking this process."""
    ranks._forking()  # called here, because it changes the environment for a moment
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        address = os.path.join(folder, "parents")
        with socketserver.UnixStreamServer(address, _Asked) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield _ASK.format(address=address)
            finally:
                server.shutdown()


class _Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Fork one process, and send its pid."""
        self.wfile.write(b"%d\n" % _fork(*json.loads(self.rfile.readline())))


def _start(launcher: ParentLauncher | LocalControllerLauncher) -> None:
    environment = {**os.environ, **launcher.get_env()}
    launcher.pid = _fork(launcher.args, environment, launcher.work_dir, launcher.output_file)


def _fork(*how: Any) -> int:
    process = ranks._forking().Process(target=_be, args=how, daemon=False)
    process.start()
    processes._children.discard(process)  # type: ignore[attr-defined]  # nobody waits for it: clusters are ended by name
    return int(process.pid)


def parent_of(folder: Path) -> Any:
    """Return the process of the parent of the cluster that `folder` describes. It is not started yet."""
    args = [sys.executable, "-m", "nbkit.bridge.parent.parent", str(folder)]
    how = (args, dict(os.environ), os.getcwd(), str(folder / "parent.log"))
    return ranks._forking().Process(target=_be, args=how, daemon=False)


def _be(args: list[str], environment: dict[str, str], work_dir: str, output: str) -> None:
    os.setsid()
    os.chdir(work_dir)
    os.environ.clear()
    os.environ.update(environment)
    for fd, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    sys.argv = args[args.index("-m") + 1 :]
    if sys.argv[0] == "ipyparallel.controller":
        from ipyparallel.controller.app import main

        multiprocessing.set_start_method("fork", force=True)  # for its own processes, as usual
    else:
        from nbkit.bridge.parent.parent import main
        from nbkit.rank.comm import link_probe

        link_probe._measured = lambda _, node_of, __: ranks.link_of(len(node_of))
        ranks.know_optimizers()
    main()
    sys.stdout.flush()
    os._exit(0)
