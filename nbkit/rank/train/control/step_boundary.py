"""Serve requests from outside (stop, switch, live cell) at a step boundary: after the same step on all ranks.

Requests reach the ranks at different times, in another thread. Their sender numbers them 1, 2, 3, ... In the reduction
of a step each rank reports if it holds the next request, and if it has prepared what it can during the training. When
all ranks have, they all act after the same step. Some things, such as groups, must be made by all ranks at once. The
ranks begin to make them after the same step, and act after a later one. So no rank ever acts alone, and no collective
is added.

A process may die before it acts on a request. The process that replaces it would never get the request, and all later
requests, even a stop, would wait behind it. So if only some ranks have held a request for SHARE_SECONDS, the ranks
share it (`share`).

When a cluster ends, its trainings end too. This request has no number: if one rank is told, all ranks end after the
same step, with a checkpoint.

Pause: `hold` keeps the training at a step boundary and serves requests there. Every rank enters it at the same
boundary. About twenty times a second a small reduction asks if all ranks hold the next request. So a stop, a switch or
a live cell acts on all ranks or on none, and so does the request to go on.

Signals: schedulers send a signal shortly before a job ends. Then the training is saved at its next boundary and ends.
`heed_end_signals` handles these signals in scripts under torchrun. On the ranks of a cluster the bridge handles them.

`newest` returns the training that was made last on this rank. Requests refer to it when no training makes steps. The
bridge sets DETACHED when the current cell is detached, so that the user may be away when it ends.
"""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nbkit.errors import Stopped
from nbkit.rank.comm.agree import all_gather_objects, largest
from nbkit.rank.train.control.garbage_collection import automatic
from nbkit.wire.cluster_end import end_signals

SHARE_SECONDS = 2.0  # if only some ranks have held a request for so long, the ranks share it
LEAST_PATIENCE = 1.5  # seconds after which a training that has made no step is interrupted
LACKS, READY = 1, 2  # what `Inbox.stage` returns for a request that has arrived


class Preparation:
    """Work for a request that is done during the training. This base class does nothing."""

    def alone(self) -> bool:
        """Return True if this rank has finished its own part of the work, with or without success."""
        return True

    def lacks(self) -> bool:
        """Return True if the part that all ranks must do at once is not finished."""
        return False

    def create_groups(self) -> None:
        """Begin the part that all ranks must do at once, in a thread. Called on all ranks after the same step.

        `lacks` returns True until this part has ended, with or without success.
        """


@dataclass
class _Request:
    """A request. preparation: None until it is the next request. begun: `create_groups` was called."""

    kind: str
    payload: Any
    preparation: Preparation | None = None
    begun: bool = False


class Inbox:
    """The requests that have arrived at this rank, by number. Thread-safe. acted: the last number that was served."""

    def __init__(self) -> None:
        self.acted = 0
        self._waiting: dict[int, _Request] = {}
        self._lock = threading.Lock()

    def post(self, number: int, kind: str, payload: Any = None) -> None:
        """Add a request. A number that was served already is ignored."""
        with self._lock:
            if number > self.acted:
                self._waiting[number] = _Request(kind, payload)
        self.stage(self.acted + 1)

    def stage(self, number: int) -> int:
        """Return the state of request `number`, the next one, on this rank: READY, LACKS or 0.

        LACKS: only the part that all ranks must do at once is missing. 0: this rank is still preparing its own part, or
        the request has not arrived.
        """
        with self._lock:
            request = self._waiting.get(number)
            if request is None:
                return 0
            if request.preparation is None:
                # Not before it is the next one: an earlier request may still change the state.
                request.preparation = preparers.get(request.kind, lambda payload: Preparation())(request.payload)
        if not request.preparation.alone():
            return 0
        return LACKS if request.preparation.lacks() else READY

    def prepare_collectively(self, number: int, *, begin: bool) -> bool:
        """Return True if `create_groups` was called for request `number`. begin: call it now."""
        with self._lock:
            request = self._waiting.get(number)
        if request is None or request.preparation is None:
            return False
        if begin and not request.begun:
            request.begun = True
            request.preparation.create_groups()
        return request.begun

    def highest(self) -> int:
        """Return the highest number that arrived or was served."""
        with self._lock:
            return max(self._waiting, default=self.acted)

    def waiting(self) -> dict[int, tuple[str, Any]]:
        """Return number -> (kind, payload), for the requests that have arrived and were not served."""
        with self._lock:
            return {number: (each.kind, each.payload) for number, each in self._waiting.items()}

    def take(self, number: int) -> tuple[str, Any]:
        """Remove request `number` and return (kind, payload). From now on it counts as served."""
        with self._lock:
            self.acted = number
            request = self._waiting.pop(number)
            return request.kind, request.payload

    def drop(self, upto: int) -> list[tuple[int, str, Any]]:
        """Remove the requests up to `upto`, and return them as (number, kind, payload). They now count as served."""
        with self._lock:
            self.acted = max(self.acted, upto)
            numbers = sorted(number for number in self._waiting if number <= self.acted)
            dropped = [self._waiting.pop(number) for number in numbers]
        return [(number, each.kind, each.payload) for number, each in zip(numbers, dropped, strict=True)]


inbox = Inbox()

# kind -> function of the payload, called on every rank at the same boundary. "unserved" gets (number, kind, payload) of
# a request that no boundary will serve, because the training ended first.
handlers: dict[str, Callable[[Any], None]] = {}

# kind -> function of the payload that begins to prepare this rank's own part, in its own thread.
preparers: dict[str, Callable[[Any], Preparation]] = {}

run = 0
"""The number of the newest run of steps. It is equal on all ranks."""
began = 0.0
"""The time.time() when the newest training of this rank began to make steps."""
_training: Any = None
_told_to_end = ""
_progress: dict[str, Any] = {}
_describe: Callable[[], dict[str, Any]] = dict


def training() -> Any:
    """Return the Trainer or Job that is making steps now, or None. From any thread."""
    return _training


def progress() -> dict[str, Any]:
    """Return the progress of the newest training. From any thread.

    Its keys: step, goal (the last step; 0: not known), loss, tokens_per_s, unit ("tokens" or "rows", for tokens_per_s),
    step_s (seconds of the longest recent step), eta_s.
    """
    return _progress | _describe()


def report(**numbers: Any) -> None:
    """Set entries of the dict that `progress` returns."""
    _progress.update(numbers)


def report_by(describe: Callable[[], dict[str, Any]]) -> None:
    """Make `progress` call `describe` until the training ends. So a step computes these numbers only on request."""
    global _describe
    _describe = describe


def patience() -> float:
    """Return the seconds that a stop waits for the training to reach a boundary; 0 if none runs. From any thread.

    The ranks agree on a request within two steps. Ranks on GPUs read the result one step later.
    """
    if _training is None:
        return 0.0
    return max(LEAST_PATIENCE, 4 * float(progress().get("step_s") or 0.0))


def forget(device: torch.device) -> None:
    """Drop all requests until now, which were meant for an earlier training. Collective: ranks agree on the numbers.

    So a stop that came too late for one training does not stop the next training on some ranks.
    """
    global run
    highest, run = largest([inbox.highest(), run + 1], device=device)
    _tell_unserved(inbox.drop(highest))


def meet(device: torch.device) -> None:
    """Agree on the next request after new ranks have joined. Collective."""
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
    """Note that `job` starts to make steps."""
    global _training, began, _describe
    _progress.clear()
    _describe = dict
    _training, began = job, time.time()


def leave() -> None:
    """Note that there are no more boundaries. Requests that were not served go to handlers["unserved"]."""
    global _training, _describe
    _progress.update(_describe())
    _training, _describe = None, dict
    _tell_unserved(inbox.drop(inbox.highest()))


def tell_to_end(why: str) -> None:
    """Make this training and any later one save itself and end at its next boundary, because the cluster ends.

    From any thread. why: for example "the parent of the ranks was ended". "" revokes an earlier call.
    """
    global _told_to_end
    _told_to_end = why


def told_to_end() -> bool:
    """Return True if this rank was told to end. From any thread."""
    return bool(_told_to_end)


def end() -> NoReturn:
    """Save the training and raise Stopped, because at least one rank was told to end. Collective, at a boundary.

    On ranks that were told, handlers["ended"] gets (why, number of finished steps, result of the save in words).
    """
    saves = getattr(_training, "saves", None)
    saved = saves.save_at_end() if saves is not None else "not saved: in a loop of your own, your code must save"
    step = _training.step
    if _told_to_end and "ended" in handlers:
        handlers["ended"]((_told_to_end, step, saved))
    raise Stopped(
        f"{_told_to_end or 'another rank was told to end'}: the training has ended after step {step}, {saved}"
    )


def act(number: int) -> None:
    """Serve request `number`, which all ranks hold. Raises Stopped for a stop."""
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


def hold(device: torch.device, *, begun: Callable[[], None] = lambda: None) -> None:
    """Wait until a request calls `let_go`. Collective. Raises Stopped when the user stops the training.

    begun: called as soon as `is_held` is true.
    """
    global _held
    is_outer, _held = not _held, True
    begun()
    if not is_outer:
        return
    polls = 0  # number of successive polls in which only some ranks held the next request
    try:
        with automatic():
            while _held:
                asked = inbox.acted + 1
                # LACKS is enough here: there is no running step during which the rest could be prepared.
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
    """Let the training go on. Return True if it was held."""
    global _held
    was, _held = _held, False
    return was


def is_held() -> bool:
    """Return True if the training is held. From any thread."""
    return _held


def heed_end_signals() -> None:
    """Handle the signals that announce the end of the job, unless they have a handler. Call it before a training."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in end_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, lambda number, _: tell_to_end(f"the job ends soon ({_name(number)})"))


def _name(number: int) -> str:
    return signal.Signals(number).name


_newest: weakref.ref[Any] | None = None


def note(owner: Any) -> None:
    """Note that `owner` (a Trainer or a Job) has just been made."""
    global _newest
    _newest = weakref.ref(owner)


def newest() -> Any:
    """Return the Trainer or Job made last, or None if it no longer exists. From any thread."""
    return _newest() if _newest is not None else None


DETACHED: ContextVar[bool] = ContextVar("detached", default=False)
