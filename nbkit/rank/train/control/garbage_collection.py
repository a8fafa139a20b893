"""Hold Python's garbage collection to the boundaries between steps, the same ones on all ranks.

Python collects whenever a process has made enough objects, so each rank pauses at another place, and the others wait
for it in their next collective. Looking at all objects takes a rank that has imported torch about 0.1 s. torchtitan
holds it to every 50th step instead. Here the objects of each step are looked at after the step, which takes some
microseconds. So a reference cycle that holds activations lives for one step at most.
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
    """Collect only in `collect` inside. Does nothing if the user has disabled the garbage collection."""
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


def collect(step: int) -> None:
    """Collect what has become garbage since the last boundary, if collection is held. step: how many are finished."""
    if _held:
        gc.collect(2 if step % _ALL_EVERY == 0 else 1 if step % _MIDDLE_EVERY == 0 else 0)


def _in_a_child() -> None:
    """Collect as usual in a forked process, such as a worker of a data loader. It comes to no boundary."""
    global _held
    if _held:
        _held = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)
