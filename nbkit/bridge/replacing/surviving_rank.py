"""A rank of a training that waits for its parent, because another rank died or the number of ranks changes.

Messages arrive on the link's thread. The main thread, in which the training runs, takes them from a queue.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from nbkit.bridge import calls
from nbkit.bridge.replacing.handover import hand_over
from nbkit.bridge.replacing.statement import NOWHERE, statement_of
from nbkit.bridge.runner import Runner
from nbkit.errors import ClusterError, NbkitError, Stopped
from nbkit.rank.train.own_loop.own_loop import OwnLoop
from nbkit.rank.train.replace.recover import recover
from nbkit.rank.train.replace.resume_fit import FitRange, NewWorld
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary, WantedWorld
from nbkit.rank.train.resize.resize import resize
from nbkit.rank.train.step.failure import PEER_GONE
from nbkit.rank.world import failure_alarm, world
from nbkit.rank.world.meeting import PARTED, unwatched
from nbkit.wire.messages import (
    DeviceFailed,
    FitEntered,
    FitLeft,
    FormResizedWorld,
    FormWorld,
    ForRank,
    GivenUp,
    LeaveWorld,
    RankIsReplaced,
    ReadyToForm,
    TrainingGoesOn,
    WaitsForOthers,
    WantedSize,
)

NEWS_SECONDS = 3.0  # to wait, after a collective has failed, for the report that a rank has died
WORD_SECONDS = 120.0  # to wait for the parent: twice as long as it waits for any rank
FORM_SECONDS = 30.0
_TICK = 0.05


class RankLeft(Stopped):
    """Raised on a rank that leaves the world. Its cell ends here, and then its process ends."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]  # nobody reads it, and IPython takes seconds for a traceback with frames


class SurvivingRank:
    """The RankHost (see nbkit.rank.train.replace.resume_fit) of the trainings of this rank. There is one per rank."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.link = runner, runner.link
        self._messages: queue.SimpleQueue[ForRank] = queue.SimpleQueue()
        self._broken = False  # True if a rank has died and the world was not formed again
        self.enterable = False

    # From the link's thread

    def hear(self, message: ForRank) -> None:
        """Take a message of the parent about this training."""
        if isinstance(message, RankIsReplaced):
            self._broken = True
            failure_alarm.break_out(f"rank {message.death.rank} died")
        self._messages.put(message)

    def waits(self, seconds: float, *, due: bool = False) -> None:
        self.link.send(WaitsForOthers(seconds, due))

    def leave_device(self, said: str) -> None:
        self.link.send(DeviceFailed(said))
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
        """Tell the parent where a new rank can enter the cell. Returns False if ranks are not replaced in this cell.

        statement: None if a new rank takes part only until the training is saved.
        """
        running = self.runner.running
        if len(running) != 1 or calls.place is None:
            return False
        request = running[0].request
        if not len(request.ranks) == calls.place.world_size > 1:
            return False
        while not self._messages.empty():
            self._messages.get()  # drop messages of an earlier training
        self._broken, self.enterable = False, statement is not None
        self.link.send(FitEntered(request.id, NOWHERE if statement is None else statement))
        return True

    def kept(self, path: str, step: int) -> None:
        for running in self.runner.running[:1]:
            running.saved, running.saved_step = path, step

    def leave(self, why: str = "") -> None:
        self.enterable = False
        self.link.send(FitLeft(why))

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
        self.link.send(TrainingGoesOn(said))

    def await_world(self, error: BaseException, trainer: Any, span: FitRange) -> NewWorld:
        if not self.is_broken(error):
            raise error
        while True:
            form = self._await_form(error, trainer.step)
            assert isinstance(form, FormWorld)
            try:
                self._join(form)
                hand_over(self.runner, trainer, span, form.newcomers)
            except (ClusterError, RuntimeError) as another:
                if not self.is_broken(another):
                    raise
                continue  # another rank has died
            return NewWorld(form.newcomers, form.how, form.since, form.devices)

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
        while not self._messages.empty():
            self._messages.get()
        size = WantedSize(wanted.ranks, wanted.pins, self.runner.running[0].request.id)
        error = ClusterError("The world could not be formed with another number of ranks.")
        with unwatched():
            form = self._await_form(error, -1 if trainer is None else trainer.step, size)
            if isinstance(form, LeaveWorld):
                here.leave()
                raise RankLeft(f"this rank is not needed any more: the cluster has {wanted.ranks} ranks")
            assert isinstance(form, FormResizedWorld)
            return self._form_resized(form, trainer, span)

    def _await_form(
        self, error: BaseException, step: int, size: WantedSize | None = None
    ) -> FormWorld | FormResizedWorld | LeaveWorld:
        """Tell the parent that this rank waits. Return its answer: to form the world, or to leave it.

        size: the wanted number of ranks, for a resize. Raises `error` if the dead rank is not replaced, and
        ClusterError if a resize is given up or if no answer comes.
        """
        here = world.current()
        assert here is not None
        address, port = calls.open_store() if here.place.rank == 0 else ("", 0)
        self.link.send(ReadyToForm(here.generation, step, address, port, resize=size))
        deadline = time.monotonic() + WORD_SECONDS
        while time.monotonic() < deadline:
            try:
                message = self._messages.get(timeout=_TICK)  # a stop interrupts this
            except queue.Empty:
                continue
            if isinstance(message, GivenUp) and size is not None:
                raise ClusterError(
                    "The number of ranks does not change.",
                    numbers=message.why,
                    hint=f"%cluster resize {size.size}",
                )
            if isinstance(message, GivenUp):
                error.add_note(f"It was not replaced: {message.why}.")
                raise error
            if isinstance(message, FormWorld | FormResizedWorld | LeaveWorld):
                return message
        raise ClusterError(
            "A rank has died, and its replacement did not start.",
            numbers=f"waited {WORD_SECONDS:.0f} s",
            hint="%cluster restart, then trainer.load(path)",
        ) from error

    def _form_resized(self, form: FormResizedWorld, trainer: Any, span: FitRange | None) -> tuple[int, ...]:
        """Form the world that `form` describes, and hand its new ranks what they need. Returns the new ranks."""
        here, size, newcomers = world.current(), form.size, form.newcomers
        assert here is not None
        place = replace(here.place, world_size=size, local_world_size=size)
        take_pin(form.pins[place.rank])
        calls.place = place
        running, names = self.runner.running[0], self.runner.shell.user_ns
        if names.get("world_size") == here.place.world_size:
            names["world_size"] = size
        listener = calls.take_listener() if place.rank == 0 else None
        here.resize(
            place, form.generation, listen=listener, address=form.address, port=form.port, timeout_s=FORM_SECONDS
        )
        running.request = replace(running.request, ranks=tuple(range(size)))
        if newcomers:
            hand_over(self.runner, trainer, span, newcomers)
        return newcomers

    def _join(self, form: FormWorld) -> None:
        here = world.current()
        assert here is not None
        self._broken = not self._messages.empty()  # another message means that another rank has died
        if self._broken:
            raise ClusterError("Another rank has died.")
        listener = calls.take_listener() if here.place.rank == 0 else None
        here.reform(form.generation, listen=listener, address=form.address, port=form.port, timeout_s=FORM_SECONDS)


def take_pin(pin: dict[str, Any]) -> None:
    """Use the cores and threads that are planned for the new number of ranks. The GPU stays the same."""
    if pin["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, pin["cores"])
    os.environ["OMP_NUM_THREADS"] = str(pin["threads"])
    torch.set_num_threads(pin["threads"])
