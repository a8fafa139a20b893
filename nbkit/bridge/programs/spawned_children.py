"""Hides the rank's world from the processes that a cell starts, by multiprocessing or as shell commands.

It also explains why a spawned process finds no name of a cell.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction, util
from multiprocessing.process import BaseProcess
from typing import Any

import ipykernel.zmqshell
import IPython.core.interactiveshell

from nbkit.bridge.programs.when_imported import change_when_imported
from nbkit.rank.world import world

_SAID = (
    "a spawned process imports what it runs, and cannot import what a cell has defined. Put it into a .py file and "
    'import it; or fork: multiprocessing_context="fork" of a DataLoader, mp.get_context("fork")'
)


_OF_THE_WORLD = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def hide_the_world() -> None:
    """Hide this rank's world from processes that are started from now on: they are no ranks of it.

    They are started by multiprocessing, or as shell commands of a cell.

    `mp.spawn` is how a program starts a world of its own. Where its processes found the last of these variables, all of
    them would join a store that nobody serves. RANK and WORLD_SIZE stay: workers of a DataLoader read them.
    """
    os.register_at_fork(after_in_child=_leave_the_world)
    for module in (ipykernel.zmqshell, IPython.core.interactiveshell):  # of `!`, `!!` and `%sx`
        for name in ("system", "getoutput", "get_output_error_code"):
            if hasattr(module, name):
                setattr(module, name, _outside_the_world(getattr(module, name)))
    change_when_imported({"IPython.core.magics.script": _change_scripts})
    plain: Any = getattr(util, "spawnv_passfds", None)
    if plain is None:  # a Python that starts them otherwise: they see what the rank does
        return

    def spawnv_passfds(*args: Any) -> Any:
        held = {name: os.environ.pop(name) for name in _OF_THE_WORLD if name in os.environ}
        try:
            return plain(*args)
        finally:
            os.environ.update(held)

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def _change_scripts(module: Any) -> None:
    """Change `%%bash` and its like."""
    module.ScriptMagics.shebang = _outside_the_world(module.ScriptMagics.shebang)


def _outside_the_world(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which starts a program that finds no variable of this rank's world, as in a notebook's `!`."""

    @functools.wraps(run)
    def outside(*args: Any, **options: Any) -> Any:
        with _without_variables():
            return run(*args, **options)

    return outside


@contextmanager
def _without_variables() -> Iterator[None]:
    here = world.current()
    known = {} if here is None else here.variables
    held = {name: value for name, value in known.items() if os.environ.get(name) == value}  # not those the user has set
    for name in held:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(held)


def _leave_the_world() -> None:
    for name in _OF_THE_WORLD:
        os.environ.pop(name, None)


def warn_of_cells() -> None:
    """From now on, when a process is spawned that would need something of a cell."""
    plain = reduction.dump

    def dump(item: Any, file: io.BytesIO, protocol: int | None = None) -> None:
        begun = file.tell() if isinstance(file, io.BytesIO) else 0
        plain(item, file, protocol)
        # A script under %run has a file, and is imported from there.
        if isinstance(item, BaseProcess) and isinstance(file, io.BytesIO) and not hasattr(_main(), "__file__"):
            if b"__main__" in file.getvalue()[begun:]:
                print(f"nbkit: {_SAID}", file=sys.stderr)  # in every cell: a warning is shown once

    reduction.dump = dump  # type: ignore[assignment]


def _main() -> Any:
    return sys.modules["__main__"]
