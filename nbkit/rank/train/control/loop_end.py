"""The end of a run of steps: all ranks leave it after the same step, or all are told which one has left it alone.

A rank that breaks a loop, or whose loader gives less than those of others, never comes to their next step, where they
would wait for it. So the first rank that has left says so in the store of the world, with the step. The others look
there twice a second, each from a thread. One that makes a later step says that too, and both raise one error that names
both. Nothing is added to a step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from nbkit.errors import TrainingError
from nbkit.rank.world import watchdog, world

LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.02
PARTED = "left the training alone"
_LEFT, _COME, _ALL, _APART = "left", "come", "all", "apart"


class LoopEnd:
    """Of one run of steps of all ranks. number: of the run, the same on all of them.

    making: tells the step that this rank makes, or has made last. apart: what is said when the ranks have parted.
    """

    def __init__(self, number: int, making: Callable[[], int]) -> None:
        self._number, self._making = number, making
        self._over = threading.Event()
        self.apart = ""

    def begin(self) -> None:
        """Look whether another rank has left, from now on until `end`."""
        here = world.current()
        if here is not None and here.place.world_size > 1:
            threading.Thread(target=self._watch, name="nbkit-loop-end", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def leave(self) -> None:
        """Say that this rank makes no further step of the run. Does not wait."""
        if (here := world.current()) is not None and here.place.world_size > 1 and not here.dirty:
            mine = {"rank": here.place.rank, "step": self._making(), "at": _line()}
            self._store(here).compare_set(_LEFT, "", json.dumps(mine))

    def arrive(self) -> None:
        """Wait until every rank has come to the end of the run. Raises TrainingError where others go on without it."""
        here = world.current()
        if here is None or here.place.world_size == 1:
            return
        self.leave()
        if here.dirty:
            raise RuntimeError(f"The end of the training was aborted: {here.dirty}")
        store = self._store(here)
        if store.add(_COME, 1) == here.place.world_size:
            store.set(_ALL, "here")
        pause = 0.0005
        while not store.check([_ALL]):
            if here.dirty or world.current() is not here:
                raise RuntimeError(f"The end of the training was aborted: {here.dirty}")
            if store.check([_APART]):
                self._part(here, store)
                raise self.error()
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_SECONDS)

    def error(self) -> TrainingError:
        """Return what every rank raises when they have parted."""
        return TrainingError(
            "A rank has left the training alone, and the others would wait for it.",
            numbers=self.apart,
            hint="if job.stop_if(flag): break   leaves the loop on all ranks, where the flag is set on any of them",
        )

    def _watch(self) -> None:
        key, store = "", None
        while not self._over.wait(LOOK_SECONDS):
            here = world.current()
            if here is None or here.dirty:
                continue
            try:
                if store is None or key != here.key:
                    own: Any = here._require_store()
                    store, key = self._store(here, own.clone()), here.key  # nccl waits in the world's own
                if not store.check([_LEFT]):
                    continue
                left, step = json.loads(store.get(_LEFT)), self._making()
                if step > left["step"] and not self._over.is_set():
                    told = {"left": left, "goes": {"rank": here.place.rank, "step": step, "at": _line()}}
                    store.compare_set(_APART, "", json.dumps(told))
                    self._part(here, store)
                    return
            except Exception:  # the store is gone, and rank 0 with it: that is told in other ways
                store = None

    def _part(self, here: world.World, store: Store) -> None:
        told = json.loads(store.get(_APART))
        left, goes = told["left"], told["goes"]
        self.apart = (
            f"rank {left['rank']} left after step {left['step']}{left['at']}; "
            f"rank {goes['rank']} makes step {goes['step']}{goes['at']}"
        )
        watchdog.break_out(f"rank {left['rank']} {PARTED}")

    def _store(self, here: world.World, store: Store | None = None) -> Store:
        return PrefixStore(f"{here.key}/end/{self._number}", store or here._require_store())


def _line() -> str:
    """Return where the main thread is in the user's code: " at line 3"."""
    stack = watchdog.main_thread_stack()
    return f" at line {stack[-1].rpartition(':')[2].partition(' ')[0]}" if stack else ""
