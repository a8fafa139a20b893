"""A rank whose training is broken off because another rank died. It waits for a message of its parent, and goes on.

The messages come on the thread of the link. The main thread, in which the training runs, takes them from a queue.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from nbkit.bridge import calls
from nbkit.bridge.calls import BroughtProject
from nbkit.bridge.replacing.brought_files import hand_on
from nbkit.bridge.replacing.form_resized import RankLeft, form_resized
from nbkit.bridge.replacing.handing import broadcast, gathered
from nbkit.bridge.replacing.namespace import equal_names, names_of
from nbkit.bridge.replacing.statement import NOWHERE, statement_of
from nbkit.bridge.runner import Runner
from nbkit.errors import ClusterError, NbkitError
from nbkit.rank.train.own_loop.own_loop import OwnLoop
from nbkit.rank.train.replace import stages
from nbkit.rank.train.replace.pickle_by_value import dumps
from nbkit.rank.train.replace.recover import recover
from nbkit.rank.train.replace.resume_fit import FitRange, NewWorld
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary, WantedWorld
from nbkit.rank.train.resize.resize import resize
from nbkit.rank.train.step.failure import PEER_GONE
from nbkit.rank.world import failure_alarm, world
from nbkit.rank.world.meeting import PARTED
from nbkit.wire.cells import CellRequest

NEWS_SECONDS = 3.0  # a failed collective shows a peer's end before its death is reported
WORD_SECONDS = 120.0  # twice as long as the parent waits for anybody
FORM_SECONDS = 30.0
_TICK = 0.05


@dataclass(frozen=True)
class CellHandover:
    """The data that a new rank gets before it has a Trainer.

    trains: it will get a Trainer. span: of the `fit` under way, or None. dtype: torch's default. names: pickled. bound:
    see RankNames. lacks: names that it does not get. project: the copied files to import from, or None.
    """

    request: CellRequest
    trains: bool
    span: FitRange | None
    dtype: torch.dtype
    names: bytes
    bound: dict[str, str]
    lacks: tuple[str, ...]
    project: BroughtProject | None


class SurvivingRank:
    """The host of the trainings of this rank: see nbkit.rank.train.replace.resume_fit.Host. One per rank."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.link = runner, runner.link
        self._words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._broken = False  # a rank has died, and the world was not formed since
        self.enterable = False

    # From the link's thread

    def hear(self, word: dict[str, Any]) -> None:
        """Take a message of the parent.

        died: another rank has died and is being replaced. form: everyone waits. kept: it is not replaced after all.
        """
        if word["do"] == "died":
            self._broken = True
            failure_alarm.break_out(f"rank {word['rank']} died")
        self._words.put(word)

    def waits(self, seconds: float, *, due: bool = False) -> None:
        self.link.send(event="stands", seconds=seconds, due=due)

    def leave_device(self, said: str) -> None:
        self.link.send(event="device_failed", said=said)
        os._exit(1)  # skips the cleanup of Python and CUDA at exit, which would wait for the device

    def asks(self) -> bool:
        return self.runner.prompts.open is not None

    # In the main thread

    def enter(self, trainer: Any, caller: FrameType) -> bool:
        running, names = self.runner.running, self.runner.shell.user_ns
        if not running or threading.current_thread() is not threading.main_thread():
            return False
        request, statement = running[0].request, None
        if caller.f_locals is names and self.runner.own.is_cell(caller):
            source = self.runner.shell.transform_cell(request.source)
            statement = statement_of(source, caller, lambda name: names.get(name) is trainer)
        return self._seat(statement)

    def loop(self, job: Any) -> OwnLoop | None:
        if threading.current_thread() is not threading.main_thread() or job.own_loop.recovery.on_failure != "replace":
            return None
        return OwnLoop(job) if self._seat(None) else None

    def _seat(self, statement: int | None) -> bool:
        """Tell the parent where a new rank can enter the cell. Returns False if no rank is replaced in this cell.

        statement: None if a new rank takes part only until the training is saved.
        """
        running = self.runner.running
        if len(running) != 1 or calls.place is None:
            return False
        request = running[0].request
        if not len(request.ranks) == calls.place.world_size > 1:
            return False
        while not self._words.empty():
            self._words.get()  # left from an earlier training
        self._broken, self.enterable = False, statement is not None
        self.link.send(event="seat", cell=request.id, statement=NOWHERE if statement is None else statement)
        return True

    def kept(self, path: str, step: int) -> None:
        for running in self.runner.running[:1]:
            running.saved, running.saved_step = path, step

    def leave(self, why: str = "") -> None:
        self.enterable = False
        self.link.send(event="seat", cell="", why=why)

    def is_broken(self, error: BaseException) -> bool:
        here, deadline = world.current(), time.monotonic() + NEWS_SECONDS
        if here is not None and here.dirty.endswith(PARTED):  # nobody has died
            return False
        lost = any(sign in str(error) for sign in PEER_GONE) or (here is not None and bool(here.dirty))
        while lost and not self._broken and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._broken

    def recover(self, trainer: Any, newcomers: tuple[int, ...]) -> Any:
        return recover(trainer, newcomers)

    def tell(self, said: str) -> None:
        self.link.send(event="replaced", said=said)

    def await_world(self, error: BaseException, trainer: Any, span: FitRange) -> NewWorld:
        if not self.is_broken(error):
            raise error
        stages.begin("noticed")
        while True:
            word = self._form(error, trainer.step)
            stages.mark("everyone waits")
            try:
                self._join(word)
                stages.mark("world formed")
                self.hand_over(trainer, span, word["newcomers"])
            except (ClusterError, RuntimeError) as another:
                if not self.is_broken(another):
                    raise
                continue  # another one has died
            return NewWorld(tuple(word["newcomers"]), word["how"], word["since"], word["devices"])

    def resized(self, trainer: Any, asked: ResizeAtBoundary, span: FitRange | None) -> None:
        here = world.current()
        assert here is not None
        try:
            asked.done(resize(trainer, asked.wanted, span), None)
        except (NbkitError, RuntimeError) as error:
            asked.done(None, error)
            if world.current() is not here or not isinstance(error, NbkitError):
                raise

    def resize(self, wanted: WantedWorld, trainer: Any, span: FitRange | None) -> tuple[int, ...]:
        here = world.current()
        assert here is not None and calls.place is not None
        while not self._words.empty():
            self._words.get()
        about = {"size": wanted.ranks, "pins": list(wanted.pins), "cell": self.runner.running[0].request.id}
        error = ClusterError("The world could not be formed with another number of ranks.")
        word = self._form(error, -1 if trainer is None else trainer.step, **about)
        if word["do"] == "leave":
            here.leave()
            raise RankLeft(f"this rank is not needed any more: the cluster has {wanted.ranks} ranks")
        return form_resized(self, word, trainer, span)

    def _form(self, error: BaseException, step: int, **about: Any) -> dict[str, Any]:
        """Say that this rank waits, and return the message to form the world, or that this rank leaves.

        Raises `error` if the dead rank is not replaced, and ClusterError if the number of ranks stays, or if no message
        comes. about: what else to say, for a resize.
        """
        here = world.current()
        assert here is not None
        listening = dict(zip(("address", "port"), calls.open_store(), strict=True)) if here.place.rank == 0 else {}
        self.link.send(event="waits", generation=here.generation, step=step, **listening, **about)
        deadline = time.monotonic() + WORD_SECONDS
        while time.monotonic() < deadline:
            try:
                word = self._words.get(timeout=_TICK)  # a stop interrupts this
            except queue.Empty:
                continue
            if word["do"] == "kept":
                if about:
                    raise ClusterError(
                        "The number of ranks stays what it was.",
                        numbers=word["why"],
                        hint=f"%cluster resize {about['size']}",
                    )
                error.add_note(f"It was not replaced: {word['why']}.")
                raise error
            if word["do"] in ("form", "leave"):
                return word
        raise ClusterError(
            "A rank has died, and its replacement does not come.",
            numbers=f"waited {WORD_SECONDS:.0f} s",
            hint="%cluster restart, then trainer.load(path)",
        ) from error

    def _join(self, word: dict[str, Any]) -> None:
        here = world.current()
        assert here is not None
        self._broken = not self._words.empty()  # a rank that has died since is in a further message
        if self._broken:
            raise ClusterError("Another rank has died.")
        listener = calls.take_listener() if here.place.rank == 0 else None
        here.reform(
            word["generation"], listen=listener, address=word["address"], port=word["port"], timeout_s=FORM_SECONDS
        )

    def hand_over(self, trainer: Any, span: FitRange | None, newcomers: list[int]) -> None:
        """Give the new ranks the names that are equal on all survivors, and the cell. Collective, on all ranks."""
        shell, place = self.runner.shell, calls.place
        assert place is not None
        own = names_of(shell.user_ns, shell.user_ns_hidden, trainer)
        everyone = gathered(own)
        survivors = [names for names in everyone if names is not None]
        equal, bound, lacks = equal_names(survivors)
        giver = min(set(range(place.world_size)) - set(newcomers))
        handed = None
        if place.rank == giver:
            names = dumps({name: shell.user_ns[name] for name in sorted(equal)}, classes=True)
            request, dtype = self.runner.running[0].request, torch.get_default_dtype()
            project, without = calls.brought, tuple(sorted(lacks))
            handed = CellHandover(request, trainer is not None, span, dtype, names, bound, without, project)
        hand_on(broadcast(handed, giver).project, giver, new=False)
