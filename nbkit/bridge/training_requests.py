"""Executes the controls that a notebook sends to a training (switch, try, pause, trace, ...), and keeps their results.

While the training makes steps, all ranks execute a control at the same step boundary, like a stop. A refused strategy
does not end the training: the refusal is the result of the control. An error that breaks the training is the result of
the control, and is also raised in the training. Each rank keeps the result until the notebook asks for it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nbkit.errors import NbkitError, NotFinite, TrainingError, UsageError
from nbkit.quoting import user_path
from nbkit.rank.background_threads import examining
from nbkit.rank.device import accelerator
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import newest
from nbkit.rank.train.estimate import strategy_table
from nbkit.rank.train.estimate.time_model import measured_pace
from nbkit.rank.train.out_of_memory import rescue
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary, WantedWorld, planned
from nbkit.rank.train.resize.resize import check_handed, resize
from nbkit.rank.train.switch import prefetch

RESULTS_KEPT = 50
TABLE_SECONDS = 0.05  # the longest time for which a request waits for a new table
TABLE_REST = 20  # times the duration of the last table, or search for findings, until the next one
STAMP_CHANGE = 0.05  # a relative change of the step time that makes a new table: predictions depend on that time
STAMP_STEPS = 200  # steps between two tables in a long training; in a young one, each doubling of its steps


@dataclass(frozen=True)
class Control:
    """An action on a training. id: made by the notebook. do: a key of `_ACTIONS`."""

    id: str
    do: str
    args: Mapping[str, Any]


class TrainingRequestHandler:
    """Executes the controls of one rank, and answers questions about them. There is one object per rank."""

    def __init__(self) -> None:
        self.results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._served: set[str] = set()  # ids of controls whose execution has begun
        self._table: dict[str, Any] = {}
        self._stamp = ""
        self._timed = False  # True if the table has the measured step time of the strategy in force
        self._seconds = 0.0  # the step time that last caused a new table
        self._rest = 0.0  # time until which an older table of the same strategy is good enough
        self._tabling: threading.Thread | None = None
        self._found = self._shown = 0  # number of findings about the model: so far, and in the table
        self._looking: threading.Thread | None = None
        self._looked_at, self._looks_rest = 0, 0.0  # id of the last job that was examined, and time of the next
        step_boundary.handlers["control"] = self.serve
        step_boundary.preparers["control"] = self.prepare

    def prepare(self, control: Control) -> step_boundary.Preparation:
        """Begin the work of a switch that can run beside the training, before its boundary.

        See nbkit.rank.train.switch.prefetch.
        """
        owner = step_boundary.training()
        job = getattr(owner, "job", owner)
        text = control.args.get("strategy") if control.do in ("switch", "try") else None
        if control.do == "undo" and job is not None:
            text = job.previous
        return prefetch.begin(job, text)

    def serve(self, control: Control) -> None:
        """Execute `control`. Called on all ranks, at a step boundary, or in a cell when no training makes steps."""
        owner = step_boundary.training() or newest()
        job = getattr(owner, "job", owner)
        predicted: dict[str, Any] = {}
        self._served.add(control.id)
        try:
            predicted = _predicted(control, job)
            result = _act(control, owner)
        except ResizeAtBoundary as asked:  # `fit` carries it out
            asked.done = lambda done, error: self._tell(control, owner, result=done, error=error)
            raise
        except BaseException as error:
            self._tell(control, owner, error=error)
            # All ranks refuse together. After any other error the training cannot simply go on.
            if isinstance(error, NotFinite) or not isinstance(error, NbkitError) or _torn(owner):
                raise
            return
        goes_on = step_boundary.training() is not None and not step_boundary.is_held()
        switch = job.switcher.pending if control.do in ("switch", "undo") else None
        if goes_on and switch is not None and not switch.done():
            # The first step under the new strategy gives the result. No other control is executed before that.
            switch.add_done_callback(lambda pending: self._ended(control, owner, pending, predicted))
            return
        if control.do == "save" and (saving := owner.saves.pending) is not None:
            saving.add_done_callback(lambda pending: self._ended(control, owner, pending))
            return
        tell = partial(self._tell, control, owner, result=result, predicted=predicted)
        if control.do == "pause":
            # Whoever knows of the pause may look at the ranks, or resume, at once.
            step_boundary.hold(job.device, begun=tell)
        else:
            tell()

    def _ended(
        self, control: Control, owner: Any, pending: Future[Any], predicted: Mapping[str, Any] | None = None
    ) -> None:
        error = pending.exception()
        result = asdict(pending.result()) if error is None else None
        self._tell(control, owner, result=result, error=error, predicted=predicted)

    def unserved(self, control: Control) -> None:
        """Set the result of a `control` that the training did not execute before it ended."""
        why = TrainingError(
            "The training ended before its next step boundary.", hint="again: it acts on the newest Trainer now"
        )
        self._tell(control, newest(), error=why, served=False)

    def result(self, id: str) -> dict[str, Any]:
        """Return {"result": the result of a control or None, "known": True if this rank has got the control}."""
        result = self.results.get(id)
        waits = any(getattr(payload, "id", "") == id for _, payload in step_boundary.inbox.waiting().values())
        return {"result": result, "known": result is not None or waits or id in self._served}

    def strategies(self, known: str = "") -> dict[str, Any]:
        """Return the progress of the training, and the newest table of its strategies.

        The table is left out if the notebook already has it, with the stamp `known`.

        The table is made in its own thread: with many ranks it takes longer than other requests can wait. A second
        thread examines the model, for example runs it, which takes seconds. After each finding a new table is made. The
        first finding is always about the strategy in force.
        """
        training = step_boundary.training()
        owner = training or newest()
        answer: dict[str, Any] = {
            "training": training is not None,
            "held": step_boundary.is_held(),
            "job": owner is not None,
        }
        if owner is None:
            return {**answer, "stamp": "", "table": None}
        job = getattr(owner, "job", owner)
        step, strategy = job.step, str(job.strategy)
        age = step.bit_length() + step // STAMP_STEPS
        pace, found = measured_pace(job, job.strategy), self._found
        # Step times from before the last switch do not hold any more.
        timed, seconds = pace is not None and not pace.ago, pace.seconds if pace is not None else 0.0
        if abs(seconds - self._seconds) > STAMP_CHANGE * self._seconds:
            self._seconds = seconds
        trials = job.ledger.paces.trials
        stamp = f"{id(job)}/{strategy}/{len(self.results)}/{age}/{timed}/{self._seconds}/{found}/{trials}"
        # The first step creates the optimizer's state, which a switch has to move too.
        old = self._table.get("strategy") != strategy or (step > 0 and self._table.get("step") == 0)
        old = old or timed > self._timed or found > self._shown
        if stamp != self._stamp and _idle(self._tabling) and (old or time.time() > self._rest):
            self._tabling = threading.Thread(
                target=self._make_table, args=(job, stamp, timed, found), name="nbkit-table", daemon=True
            )
            self._tabling.start()
            self._tabling.join(TABLE_SECONDS)
        if (
            _idle(self._tabling)
            and _idle(self._looking)
            and (self._looked_at != id(job) or time.time() > self._looks_rest)
        ):
            self._looking = threading.Thread(target=self._look, args=(job,), name="nbkit-look", daemon=True)
            self._looking.start()
        table, stamp = self._table, self._stamp
        answer |= {"step": step, "strategy": strategy, "progress": step_boundary.progress(), "stamp": stamp}
        return {**answer, "table": table if stamp != known else None}

    def option(self, strategy: str) -> dict[str, Any]:
        """Return {"row": a row of the table for this strategy, even if the table lacks it; None without a Trainer}."""
        owner = step_boundary.training() or newest()
        if owner is None:
            return {"row": None}
        with examining():
            return {"row": strategy_table.option(getattr(owner, "job", owner), strategy)}

    def _make_table(self, job: Any, stamp: str, timed: bool, found: int) -> None:
        began = time.time()
        try:
            accelerator().choose_in_thread(job.device)
            with examining():
                self._table, self._stamp = strategy_table.table(job), stamp
            self._timed, self._shown = timed, found
            self._rest = time.time() + TABLE_REST * (time.time() - began)
        except Exception as error:
            # A switch may have replaced the sharded model meanwhile. The next call tries again.
            print(f"no table of strategies: {type(error).__name__}: {error}", file=sys.__stderr__)

    def _look(self, job: Any) -> None:
        began, self._looked_at = time.time(), id(job)
        try:
            accelerator().choose_in_thread(job.device)
            with examining():
                for _ in strategy_table.findings(job):
                    self._found += 1
        except Exception as error:
            print(f"the model could not be looked at: {type(error).__name__}: {error}", file=sys.__stderr__)
        self._looks_rest = time.time() + TABLE_REST * (time.time() - began)

    def _tell(
        self,
        control: Control,
        owner: Any,
        *,
        result: Any = None,
        error: BaseException | None = None,
        served: bool = True,
        predicted: Mapping[str, Any] | None = None,
    ) -> None:
        changed = error is None and control.do in ("switch", "undo")
        self.results[control.id] = {
            "id": control.id,
            "do": control.do,
            "args": dict(control.args),
            # The result of a switch comes after the step that follows it.
            "step": (result or {}).get("step", owner.step) if owner is not None else 0,
            "strategy": str(owner.strategy) if owner is not None else "",
            "ok": error is None,
            "error": type(error).__name__ if error is not None else "",
            "what": getattr(error, "what", str(error)) if error is not None else "",
            "numbers": getattr(error, "numbers", ""),
            "hint": getattr(error, "hint", ""),
            "result": result if error is None else {},
            "served": served,
            "predicted": dict(predicted or {}),
            "deviations": [" ".join(each) for each in owner.strategy.deviations] if changed else [],
        }
        self._served.discard(control.id)
        while len(self.results) > RESULTS_KEPT:
            self.results.popitem(last=False)


def _idle(thread: threading.Thread | None) -> bool:
    return thread is None or not thread.is_alive()


def _torn(owner: Any) -> bool:
    """Return True if the ranks may differ.

    Either a switch in place could not be undone, or a step of a trial failed. It may have failed on this rank only,
    while the others still wait in it.
    """
    integrity = getattr(getattr(owner, "job", owner), "integrity", None)
    if integrity is None:
        return False
    return bool(integrity.half_way or (step_boundary.training() is not None and integrity.broken_off))


def _predicted(control: Control, job: Any) -> dict[str, Any]:
    """Return the predicted bytes and seconds of a switch; {} for any other control. Collective."""
    if control.do not in ("switch", "undo") or job is None:
        return {}
    text = job.previous if control.do == "undo" else control.args["strategy"]
    return strategy_table.predicted_switch(job, text) if text is not None else {}


def _act(control: Control, owner: Any) -> dict[str, Any]:
    """Do the action of `control`, on all ranks. Returns its result as plain values."""
    if owner is None and control.do != "resize":
        raise UsageError("There is no Trainer on the ranks.", hint="trainer = nbkit.Trainer(...)   in %%distributed")
    if control.do not in _ACTIONS:
        raise UsageError(f"{control.do!r} is not a control.", numbers=f"controls: {', '.join(_ACTIONS)}")
    return _ACTIONS[control.do](owner, **control.args)


def _switch(owner: Any, strategy: str) -> dict[str, Any]:
    return asdict(owner.switch(strategy, beside=True))


def _undo(owner: Any) -> dict[str, Any]:
    return asdict(owner.undo(beside=True))


def _try_out(owner: Any, strategy: str, steps: int) -> dict[str, Any]:
    if not hasattr(owner, "try_out"):
        raise UsageError(
            "Only a Trainer can try a strategy out: in a loop of your own nbkit cannot make the steps.",
            hint=f"%strategy {strategy}   and   %strategy --undo",
        )
    return dict(owner.try_out(strategy, steps=steps))


def _compare(owner: Any, strategies: list[str], steps: int) -> dict[str, Any]:
    if not hasattr(owner, "compare"):
        raise UsageError(
            "Only a Trainer can compare strategies: in a loop of your own nbkit cannot make the steps.",
            hint=f"%strategy {strategies[0] if strategies else 'zero3'}   and   %strategy --undo",
        )
    return dict(owner.compare(*strategies, steps=steps))


def _pause(owner: Any) -> dict[str, Any]:
    if step_boundary.training() is None:
        raise UsageError("Nothing makes steps, so there is nothing to pause.", hint="trainer.fit(...)   with --detach")
    return {}


def _resume(owner: Any) -> dict[str, Any]:
    if not step_boundary.let_go():
        raise UsageError("The training is not paused.", hint="%train pause")
    return {}


def _lr(owner: Any, value: float) -> dict[str, Any]:
    if not hasattr(owner, "lr"):
        raise UsageError(
            "Only a Trainer can get a learning rate from outside.",
            hint="%%distributed --at-step   and set it in your optimizer's param_groups",
        )
    if not 0 < value < math.inf:
        raise UsageError("A learning rate is a number above 0.", numbers=f"{value}", hint="%train lr 3e-4")
    old, owner.lr = owner.lr, value
    return {"old": old, "new": value}


def _fit(owner: Any, number: int = 0) -> dict[str, Any]:
    taken = rescue.answer(getattr(owner, "job", owner), number)
    return {**taken, "goes_on": step_boundary.let_go()}


def _save(owner: Any, path: str = "") -> dict[str, Any]:
    if not hasattr(owner, "save"):
        raise UsageError("Only a Trainer can be saved from outside.", hint="save in your loop, between two steps")
    to = (user_path(path) if path else (owner.run_dir or Path()) / "checkpoint").absolute()
    owner.save(to, beside=step_boundary.training() is not None and not step_boundary.is_held())
    return {"path": str(to)}


def _resize(owner: Any, ranks: int, strategy: str, pins: list[dict[str, Any]]) -> dict[str, Any]:
    """Change the number of ranks. owner: None if nothing trains on the ranks."""
    assert resume_fit.host is not None
    if owner is None:
        resume_fit.host.resize(WantedWorld(ranks, None, tuple(pins)), None, None)
        resume_fit.host.tell(f"The cluster has {ranks} ranks now.")
        return {"ranks": ranks}
    if not hasattr(owner, "loop"):
        raise UsageError(
            "Only a Trainer goes on with another number of ranks: nbkit cannot hand over a loop of your own.",
            hint="%cluster start -n N   and load a checkpoint",
        )
    wanted = planned(owner, ranks, strategy, tuple(pins))
    check_handed(owner, wanted)
    if step_boundary.training() is None:
        return resize(owner, wanted, None)
    if ranks > owner.job.world_size and not resume_fit.host.enterable:
        raise UsageError(
            "New ranks cannot enter this cell where it stands.",
            numbers="they can where NAME.fit(...) is a statement of its own, on all ranks, "
            "with recovery=nbkit.Recovery(on_failure='replace')",
            hint=f"%train stop, %cluster resize {ranks}, trainer.fit(...)",
        )
    raise ResizeAtBoundary(wanted)


def _trace(owner: Any, steps: int) -> dict[str, Any]:
    if step_boundary.training() is None:
        raise UsageError("Nothing makes steps, so there is nothing to trace.", hint="trainer.fit(...)   with --detach")
    if step_boundary.is_held():
        raise UsageError("The training is paused, so there is nothing to trace.", hint="%train resume")
    job = getattr(owner, "job", owner)
    return dict(job.recorder.trace(steps, after=job.step))


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "switch": _switch,
    "undo": _undo,
    "try": _try_out,
    "compare": _compare,
    "pause": _pause,
    "resume": _resume,
    "lr": _lr,
    "fit": _fit,
    "save": _save,
    "trace": _trace,
    "resize": _resize,
}


controls: TrainingRequestHandler | None = None  # set once, by the engine


def now(id: str, do: str, args: Mapping[str, Any]) -> None:
    """Execute a control at once, on the newest training. Called in a cell on every rank."""
    assert controls is not None
    controls.serve(Control(id, do, args))
