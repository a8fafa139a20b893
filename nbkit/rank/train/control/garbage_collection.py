"""Run Python's garbage collection only between steps, after the same steps on all ranks.

Python collects whenever a process has made enough objects. So each rank pauses at another time, and the others wait for
it in their next collective. After an import of torch, a full collection takes about 0.1 s. torchtitan collects after
every 50th step instead. Here the garbage among the objects of the last step is collected after each step, which takes
some microseconds. An object that was still in use at the end of its step, and becomes garbage later, stays until a
larger collection.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_MIDDLE_EVERY, _ALL_EVERY = 50, 1000
_held = False


@contextmanager
def held_to_boundaries() -> Iterator[None]:
    """Disable automatic collection inside; `collect` does it. Does nothing if the user has disabled it already."""
    global _held
    if not gc.isenabled():
        yield
        return
    _held = True
    gc.disable()
    try:
        yield
    finally:
        _held = False
        gc.enable()


@contextmanager
def automatic() -> Iterator[None]:
    """Enable automatic collection inside: in an evaluation, and while a training is paused."""
    if not _held:
        yield
        return
    gc.enable()
    try:
        yield
    finally:
        gc.disable()


def collect(step: int) -> None:
    """Collect the garbage since the last call, inside `held_to_boundaries`. step: the number of finished steps."""
    if _held:
        gc.collect(2 if step % _ALL_EVERY == 0 else 1 if step % _MIDDLE_EVERY == 0 else 0)


def _in_a_child() -> None:
    """Enable automatic collection in a forked process, such as a data loader's worker. It never calls `collect`."""
    global _held
    if _held:
        _held = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)
