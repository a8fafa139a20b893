"""The step boundary: the one place where a request from outside (stop, live cell) acts on a training.

Requests reach each rank at its own time, from another thread, numbered 1, 2, 3, ... by their sender. A rank says in the
reduction of a step whether it holds the next number, and has made ready what it can beside the training; when all do,
all act after the same step. What all ranks have to make at once (groups) they begin after the same step too, and act
after a later one. So no rank ever acts alone, and no collective is added for it.

A request may have been sent to a process that died before it acted: the one that takes its place would never hold it,
and all later requests, a stop among them, would wait behind it. So ranks that hold a request for SHARE_SECONDS while
others do not give it to them (`share`).

That a training is to end because its cluster does has no number: one rank that was told suffices, and all end after the
same step, with a checkpoint.

A pause: the training is held at a step boundary, where requests are served as between any two steps.

Every rank enters at the same boundary and asks in a small reduction, some twenty times a second, whether all hold the
next request. So a stop, a switch or a live cell acts on all of them or on none, and the word to go on does too.

In a job that goes on later: a signal that the job ends soon lets a training be saved at its next boundary, and end.

For scripts under torchrun. On the ranks of a cluster the bridge hears these signals, from the start on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nbkit.errors import Stopped
from nbkit.rank.comm.agree import all_gather_objects, largest
from nbkit.wire.cluster_end import end_signals

SHARE_SECONDS = 2.0  # some ranks hold a request for so long, and others do not
LEAST_PATIENCE = 1.5  # seconds; a training that has made no step is interrupted after them
LACKS, READY = 1, 2  # what `Inbox.stage` says of a request that is there


class Preparation:
    """What is made for a request beside the training: here nothing."""

    def alone(self) -> bool:
        """Return True if this rank has made what it can make by itself, or cannot."""
        return True

    def lacks(self) -> bool:
        """Return True if something is missing that all ranks have to make at once."""
        return False

    def create_groups(self) -> None:
        """Begin that, in a thread. Called on all ranks after the same step; `lacks` until it has ended, however."""


@dataclass
class _Request:
    """preparation: None until its turn has come. begun: what all ranks make at once."""

    kind: str
    payload: Any
    preparation: Preparation | None = None
    begun: bool = False


class Inbox:
    """Requests that have arrived at this rank, by number. Safe between threads."""

    def __init__(self) -> None:
        self.acted = 0
        self._waiting: dict[int, _Request] = {}
        self._lock = threading.Lock()

    def post(self, number: int, kind: str, payload: Any = None) -> None:
        """A request arrived. A number that was acted on already is ignored."""
        with self._lock:
            if number > self.acted:
                self._waiting[number] = _Request(kind, payload)
        self.stage(self.acted + 1)

    def stage(self, number: int) -> int:
        """Return how far this rank is with request `number`, which is the next one.

        READY; LACKS, when all but what all ranks have to make at once is ready; 0 before that, or when it is not here.
        """
        with self._lock:
            request = self._waiting.get(number)
            if request is None:
                return 0
            if request.preparation is None:
                # Not before its turn has come: what another request leaves behind is not known yet.
                request.preparation = preparers.get(request.kind, lambda payload: Preparation())(request.payload)
        if not request.preparation.alone():
            return 0
        return LACKS if request.preparation.lacks() else READY

    def prepare_collectively(self, number: int, *, begin: bool) -> bool:
        """Return True if all ranks make something at once for request `number`, from now on if they `begin`."""
        with self._lock:
            request = self._waiting.get(number)
        if request is None or request.preparation is None:
            return False
        if begin and not request.begun:
            request.begun = True
            request.preparation.create_groups()
        return request.begun

    def highest(self) -> int:
        """The highest number that arrived, or was acted on."""
        with self._lock:
            return max(self._waiting, default=self.acted)

    def waiting(self) -> dict[int, tuple[str, Any]]:
        """(kind, payload) of the requests that are here and were not acted on, by number."""
        with self._lock:
            return {number: (each.kind, each.payload) for number, each in self._waiting.items()}

    def take(self, number: int) -> tuple[str, Any]:
        """Request `number`, which counts as acted on from now."""
        with self._lock:
            self.acted = number
            request = self._waiting.pop(number)
            return request.kind, request.payload

    def drop(self, upto: int) -> list[tuple[int, str, Any]]:
        """Forget the requests up to `upto`, which now count as acted on; returns them."""
        with self._lock:
            self.acted = max(self.acted, upto)
            numbers = sorted(number for number in self._waiting if number <= self.acted)
            dropped = [self._waiting.pop(number) for number in numbers]
        return [(number, each.kind, each.payload) for number, each in zip(numbers, dropped, strict=True)]


inbox = Inbox()

# kind -> what to do with the payload, on every rank at the same boundary. "unserved" gets (number, kind, payload) of a
# request that no boundary will serve any more, because the training ended first.
handlers: dict[str, Callable[[Any], None]] = {}

# kind -> begins, in a thread of its own, to make ready for the payload what this rank makes by itself.
preparers: dict[str, Callable[[Any], Preparation]] = {}

run = 0
"""The number of the newest run of steps, the same on all ranks."""
began = 0.0
"""When (time.time()) the newest training of this rank has begun to make steps."""
_training: Any = None
_told_to_end = ""
_progress: dict[str, Any] = {}


def training() -> Any:
    """The Trainer or Job that is between its first and its last step right now, else None. From any thread."""
    return _training


def progress() -> dict[str, Any]:
    """step, goal (0: not known), loss, tokens_per_s, step_s (the longest of late), eta_s of the newest training.

    unit: what tokens_per_s counts, "tokens" or "rows". From any thread.
    """
    return dict(_progress)


def report(**numbers: Any) -> None:
    """Set what `progress` answers."""
    _progress.update(numbers)


def patience() -> float:
    """Seconds that a stop waits for the training to reach a boundary; 0 when no training runs. From any thread.

    The ranks agree on a request within two steps, and ranks on GPUs read what was agreed one step later.
    """
    if _training is None:
        return 0.0
    return max(LEAST_PATIENCE, 4 * float(_progress.get("step_s") or 0.0))


def forget(device: torch.device) -> None:
    """Requests posted before now, to whatever was running then, are out of date.

    Collective: ranks agree on the numbers, so that a stop which came too late for one training on some ranks
    does not stop the next one.
    """
    global run
    highest, run = largest([inbox.highest(), run + 1], device=device)
    _tell_unserved(inbox.drop(highest))


def meet(device: torch.device) -> None:
    """New ranks have joined: all act next on the same request. Collective."""
    global run
    acted, run = largest([inbox.acted, run], device=device)
    _tell_unserved(inbox.drop(acted))
    share(device)


def share(device: torch.device) -> None:
    """Give every rank the requests that any rank holds. Collective: see `all_gather_objects`."""
    if not dist.is_initialized() or (world_size := dist.get_world_size()) == 1:
        return
    for waiting in all_gather_objects(inbox.waiting(), world_size=world_size, device=device):
        for number in sorted(waiting.keys() - inbox.waiting().keys()):
            inbox.post(number, *waiting[number])


def enter(job: Any) -> None:
    """`job` starts to make steps."""
    global _training, began
    _progress.clear()
    _training, began = job, time.time()


def leave() -> None:
    """No more boundaries. What no boundary has served is handed to handlers["unserved"]."""
    global _training
    _training = None
    _tell_unserved(inbox.drop(inbox.highest()))


def tell_to_end(why: str) -> None:
    """The cluster of this rank ends: the training is to be saved at its next boundary, and so is any later one. From
    any thread. why: "the parent of the ranks was ended"; "": it does not end after all."""
    global _told_to_end
    _told_to_end = why


def told_to_end() -> bool:
    """Return True if this rank was told. From any thread."""
    return bool(_told_to_end)


def end() -> NoReturn:
    """At a boundary of all ranks, of which at least one was told to end: save the training. Raises Stopped. Collective.

    handlers["ended"] gets (why, finished steps, what was saved or why nothing was) on the ranks that know why.
    """
    saves = getattr(_training, "saves", None)
    saved = saves.save_at_end() if saves is not None else "not saved: a loop of your own saves itself"
    step = _training.step
    if _told_to_end and "ended" in handlers:
        handlers["ended"]((_told_to_end, step, saved))
    raise Stopped(
        f"{_told_to_end or 'another rank was told to end'}: the training has ended after step {step}, {saved}"
    )


def act(number: int) -> None:
    """All ranks hold request `number`: serve it. Raises Stopped for a stop."""
    kind, payload = inbox.take(number)
    if kind == "stop":
        raise Stopped("stopped at a step boundary")
    if kind in handlers:
        handlers[kind](payload)
    else:
        _tell_unserved([(number, kind, payload)])


def _tell_unserved(requests: list[tuple[int, str, Any]]) -> None:
    for request in requests:
        if "unserved" in handlers:
            handlers["unserved"](request)


_POLL_SECONDS = 0.05
_held = False


def hold(device: torch.device) -> None:
    """Return when `let_go` was called by a request. Collective. Raises Stopped when the user stops the training."""
    global _held
    if _held:
        return
    _held = True
    polls = 0  # in which some ranks held the next request, and others did not
    try:
        while _held:
            asked = inbox.acted + 1
            # Whatever it lacks: there is no step to make it beside.
            here = inbox.stage(asked) > 0
            lacks, ends, held = largest([not here, told_to_end(), here], device=device)
            if ends:
                end()
            if not lacks:
                polls = 0
                act(asked)
                continue
            polls = polls + 1 if held else 0
            if polls * _POLL_SECONDS > SHARE_SECONDS:
                polls = 0
                share(device)
            time.sleep(_POLL_SECONDS)
    finally:
        _held = False


def let_go() -> bool:
    """Go on; whether anything was held."""
    global _held
    was, _held = _held, False
    return was


def is_held() -> bool:
    """From any thread."""
    return _held


def heed_end_signals() -> None:
    """Hear them from now on, where nobody else does. A training begins."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in end_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, lambda number, _: tell_to_end(f"the job ends soon ({_name(number)})"))


def _name(number: int) -> str:
    return signal.Signals(number).name
