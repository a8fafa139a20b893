"""`nbkit.plan`: choose a strategy for a model, on this machine, a cluster, or hardware that a line describes.

The plan may be computed in a fork of this process (`in_a_fork`), so that its imports and memory end with the fork.
`PlanningLine` shows a line of progress during a long computation, and removes it at the end.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Self, TypeVar

from nbkit.durations import text_of
from nbkit.errors import UsageError
from nbkit.notebook.cluster.registry import notebook_shell
from nbkit.planner.choose.load import Hardware, Subject
from nbkit.planner.choose.search import Plan, Words, search
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.peak import GPTPieces
from nbkit.strategy import divisors
from nbkit.unfit_calls import says_what_it_takes

T = TypeVar("T")
Say = Callable[[str], None]


def in_a_fork(function: Callable[[Say], T], *, heard: Say) -> T:
    """Return what `function` returns, computed in a fork. The result must be picklable.

    The function can use all objects of this process, but cannot change them. It gets a callable, and `heard` is called
    here with the texts that the function passes to it. Raises the function's error, with its traceback as a note, or
    ChildProcessError if the fork ends without an answer. Ctrl-C here ends the fork. Use this only in a process that has
    not used torch. Otherwise the fork may hang in torch's thread pools.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold no lock that the fork needs
        pid = os.fork()
    if not pid:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            while (answer := _next(stream)) is not None and answer[0] == "said":
                heard(answer[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _, status = os.waitpid(pid, 0)
    if answer is None:
        raise ChildProcessError(f"a process of its own ended without an answer: {_how(status)}")
    kind, value = answer
    if kind == "failed":
        raise value
    return value  # type: ignore[no-any-return]


def _next(stream: BinaryIO) -> tuple[str, Any] | None:
    """Read one message: ("said" | "failed" | "done", value), or None at the end."""
    try:
        found: tuple[str, Any] = pickle.load(stream)
    except EOFError:
        return None
    return found


def _answer(function: Callable[[Say], object], writer: int) -> None:
    """Run the function in the fork and send its result. This never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a kernel's streams need threads, which a fork lacks
        with os.fdopen(writer, "wb", buffering=0) as stream:
            try:
                packed = pickle.dumps(("done", function(lambda text: pickle.dump(("said", text), stream))))
            except BaseException as error:
                error.add_note("".join(traceback.format_tb(error.__traceback__)[1:]).rstrip())
                try:
                    packed = pickle.dumps(("failed", error))
                except Exception:
                    packed = pickle.dumps(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
            with os.fdopen(os.dup(writer), "wb") as whole:  # buffered, to write everything even if the pipe is full
                whole.write(packed)
    finally:
        os._exit(0)


def _how(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"


_AFTER, _EVERY = 1.5, 1.0
"""Seconds before the line is first shown, and between two updates."""


class PlanningLine:
    """A context that shows the last reported step and the total time. Shows nothing outside of a notebook or terminal.

    A thread updates it, because a long computation may report nothing for a while.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what, self._width = name, what, 0
        self._out, self._done = sys.stdout, threading.Event()
        self._shown = notebook_shell() is not None or self._out.isatty()
        # A copy of the context tells a kernel which cell the thread writes for.
        self._thread = threading.Thread(target=copy_context().run, args=(self._draw,), daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._shown:
            self._thread.join()
        if self._width:
            self._write("")
            self._out.write("\r")

    def say(self, what: str) -> None:
        """Record the current step."""
        self._what = what

    def _draw(self) -> None:
        wait = _AFTER
        while not self._done.wait(wait):
            self._write(f"{self._name}: {self._what} ({text_of(time.monotonic() - self._began)})")
            wait = _EVERY

    def _write(self, line: str) -> None:
        self._out.write(f"\r{line:<{self._width}}")
        self._out.flush()
        self._width = len(line)


PRECISIONS = {None: 4, "bf16": 2, "fp16": 2}
"""Bytes of an element in computations."""
_EXAMPLE = 'nbkit.plan(nbkit.GPTConfig(width=768, layers=12, heads=12), batch=64, on="8 H100")'
_TABLE_SECONDS = 10.0  # for the table of strategies, which is computed at the first request
_IN_THE_RANK_WING = "nbkit.rank.train.estimate.model_pieces"


@says_what_it_takes(hint=_EXAMPLE)
def plan(
    model: Any,
    *,
    batch: int,
    on: str,
    precision: str | None = "bf16",
    example: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    inputs: Sequence[str] | None = None,
) -> Plan:
    """Return every strategy that fits, the fastest first, with its peak memory, seconds per step, and bytes sent.

    model: a GPTConfig, a module, or a callable that builds one. nbkit does not build a GPTConfig, and needs no torch
    for it. It runs any other model on two rows of `example`, on the CPU. batch: rows of a global batch. on: the
    hardware, such as "128 x 8 H100". precision: as for a Trainer. example: a batch of any number of rows, or a callable
    that makes one. loss, inputs: as for a Trainer. optimizer: as for a Trainer; None (the default): AdamW.

    Callables run in their own process, unless this process has imported torch. `.rows[0]` is the recommendation.
    `.refused` lists the other strategies, with the numbers. Raises UsageError for a request that nbkit cannot plan, and
    any error of the model.
    """
    asked = _Asked(model, batch, Hardware.parse(on), precision, example, loss, optimizer, inputs)
    return asked.answered(lambda subject: search(subject, batch, asked.on))


def explain(model: Any, first: str, second: str, *, batch: int, on: str, **settings: Any) -> Words:
    """Return text about how two strategies differ, and the choice with more devices, a faster network, or more rows.

    settings: the other arguments of `plan`.
    """
    asked = _Asked(model, batch, Hardware.parse(on), **settings)
    return asked.answered(lambda subject: _explained(subject, first, second, batch, asked.on))


def planned(
    variables: Mapping[str, Any],
    *,
    model: str | None,
    batch: int | None,
    on: str | None,
    precision: str,
    why: list[str] | None,
    **others: str | None,
) -> Plan | Words:
    """Return the output of `%nbkit plan`.

    variables: the notebook's variables. model and others (example, loss, optimizer) are names of variables. Without a
    model, plan for the running training, see `training_plan`.
    """
    given_too = {"--batch": batch, "--on": on, "--why": why, **{f"--{name}": value for name, value in others.items()}}
    if model is None and not any(value is not None for value in given_too.values()):
        return training_plan()
    if model is None or batch is None or on is None:
        missing = [name for name, value in {"NAME": model, "--batch": batch, "--on": on}.items() if value is None]
        raise UsageError(
            "%nbkit plan takes a model, its batch and the hardware, or nothing, for the training that runs.",
            numbers=f"missing: {', '.join(missing)}",
            hint="%nbkit plan config --batch 512 --on '8 H100'   or   %nbkit plan",
        )
    named = {"model": model, **{setting: name for setting, name in others.items() if name is not None}}
    for setting, name in named.items():
        if name not in variables:
            raise UsageError(
                f"The notebook has no variable {name!r}.",
                numbers="%nbkit plan takes the names of a GPTConfig, a module or a callable that builds one, and of "
                "what it is run on and trained with",
                hint=f"{name} = nbkit.GPTConfig(width=768, layers=12, heads=12)"
                if setting == "model"
                else f"{name} = ...   (as {setting}= of nbkit.plan)",
            )
    given = {setting: variables[name] for setting, name in named.items()}
    settings = {**given, "batch": batch, "on": on, "precision": None if precision == "fp32" else precision}
    if why is not None:
        return explain(settings.pop("model"), *why, **settings)
    return plan(**settings)


def training_plan() -> Words:
    """Return the costs of every strategy for the training on this notebook's cluster, as in the strategy panel.

    Raises UsageError if there is no training, ClusterError without a cluster.
    """
    from nbkit.notebook.cluster.cluster import current
    from nbkit.notebook.widgets.panel.view import Looked, State, reduce, text_of

    cluster = current()
    cluster.training.look_well(_TABLE_SECONDS)
    state = reduce(State(cluster.entry.name, cluster.entry.n), Looked(cluster.training.look()))
    if state.phase == "none":
        raise UsageError(
            "There is no training to plan on the ranks yet.",
            numbers=f"cluster {cluster.entry.name}, {cluster.entry.n} ranks",
            hint="%nbkit plan config --batch 512 --on '8 H100'   or   trainer = nbkit.Trainer(...)",
        )
    return Words(text_of(state))


@dataclass(frozen=True)
class _Asked:
    """A request for a plan. Creating it checks it."""

    model: Any
    batch: int
    on: Hardware
    precision: str | None = "bf16"
    example: Any = None
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    inputs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"There is no precision {self.precision!r}.", numbers="None, 'bf16', 'fp16'", hint="precision='bf16'"
            )
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise UsageError("A batch has at least one row.", numbers=f"batch={self.batch!r}", hint="batch=64")
        if isinstance(self.model, GPTConfig):
            return
        if not callable(self.model):  # a module is callable too
            raise UsageError(
                "A plan needs a GPTConfig, a module, or a callable that builds one.",
                numbers=f"this is a {type(self.model).__name__}",
                hint=_EXAMPLE,
            )
        if lacks := [name for name in ("example", "loss") if getattr(self, name) is None]:
            raise UsageError(
                "To plan a model that is no GPTConfig, nbkit must run it.",
                numbers=f"without {' and '.join(f'{name}=' for name in lacks)}",
                hint="nbkit.plan(model, example=batch, loss=loss_fn, batch=64, on='8 H100')",
            )

    def answered(self, make: Callable[[Subject], T]) -> T:
        """Return the result of `make` for the model. Run in a fork if torch would be imported only for this."""
        if isinstance(self.model, GPTConfig):
            return make(GPTPieces(self.model, element=PRECISIONS[self.precision]))
        with PlanningLine("nbkit.plan", "imports torch") as line:
            if "torch" in sys.modules:
                return make(self._measured(line.say))
            return in_a_fork(lambda say: make(self._measured(say)), heard=line.say)

    def _measured(self, say: Callable[[str], None]) -> Subject:
        # Import by name, because the notebook side must not import torch except for a user's model.
        found: Subject = importlib.import_module(_IN_THE_RANK_WING).describe(
            self.model,
            self.example() if callable(self.example) else self.example,
            loss=self.loss,
            optimizer=self.optimizer,
            inputs=self.inputs,
            precision=self.precision,
            degrees=divisors(self.on.node)[1:],
            say=say,
        )
        return found


def _explained(subject: Subject, first: str, second: str, batch: int, on: Hardware) -> Words:
    made = search(subject, batch, on)
    others = {
        "twice the devices": (batch, replace(on, nodes=2 * on.nodes)),
        "a network twice as fast": (batch, replace(on, device=replace(on.device, far=2 * on.device.far))),
        "a batch twice as large": (2 * batch, on),
    }
    lines = [made.why(first, second).text, f"The first row is {made.rows[0].settings}. It would be"]
    for what, (rows, other) in others.items():
        found = search(subject, rows, other)
        lines.append(f"  with {what}: {found.rows[0].settings if found.rows else 'nothing that fits'}")
    return Words("\n".join(lines))
