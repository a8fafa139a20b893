"""The parent of a cluster's ranks, forked from the process that ranks of tests are forked from: it has torch in memory.

To import it takes each start of a cluster some seconds of a core. All else is as at a user's: its own session,
environment, folder and log. tests/notebook/cluster/test_launch.py starts clusters as a user does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process as processes

import pytest
import ranks

from nbkit.notebook.cluster.launch.launch import ParentLauncher


@contextmanager
def forked_parents(forked: bool = True) -> Iterator[None]:
    """Clusters that this process starts meanwhile; with `forked=False` as if this were not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParentLauncher, "start", _start if forked else _AS_EVER)
        yield


_AS_EVER = ParentLauncher.start


def _start(launcher: ParentLauncher) -> None:
    environment = {**os.environ, **launcher.get_env()}
    how = (launcher.args, environment, launcher.work_dir, launcher.output_file)
    process = ranks._forking().Process(target=_be_parent, args=how, daemon=False)
    process.start()
    processes._children.discard(process)  # type: ignore[attr-defined]  # nobody waits for it: clusters are ended by name
    launcher.pid = process.pid


def _be_parent(args: list[str], environment: dict[str, str], work_dir: str, output: str) -> None:
    os.setsid()
    os.chdir(work_dir)
    os.environ.clear()
    os.environ.update(environment)
    for fd, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    sys.argv = args[2:]
    sys.path.insert(0, work_dir)

    from nbkit.bridge.parent.parent import main

    main()
    sys.stdout.flush()
    os._exit(0)
