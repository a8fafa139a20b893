"""Tracks the state of the training thread during a step. Exactly one state holds at a time, so they add up to the step.

    with phase("forward"):
        loss = model(x)

A phase inside another phase suspends the outer one. So does a wait for a collective, which has the state "wait dp" (or
"bubble" in a pipeline). Time in no phase is "other". Time in "outside" (evaluation, checkpoints, live cells) belongs to
no step. A change of state costs about a microsecond. On CUDA it is an event in the current stream, so the times are the
device's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from time import perf_counter_ns as now
from typing import Any

from nbkit.rank.device import accelerator
from nbkit.records.records import OUTSIDE as OUTSIDE

OTHER = "other"
PHASES = ("data", "forward", "backward", "optimizer", OTHER, OUTSIDE)
_LAPS_AT_MOST = 1 << 16  # in one step; an hour of evaluation inside a step must not fill the memory

Stamp = Any  # ns of perf_counter, or a CUDA event
PipelineOp = tuple[str, int, int, Stamp, Stamp]


class StepPhases:
    """The states of the training thread in one step.

    laps: (state, time at which it began), in order. stop: the time at which the step ended. routed, experts: see
    StepClock.
    """

    __slots__ = ("base", "complete", "experts", "laps", "number", "ops", "routed", "stop")

    def __init__(
        self, number: int, base: int, laps: list[tuple[str, Stamp]], stop: Stamp, ops: list[PipelineOp], complete: bool
    ) -> None:
        self.number, self.base, self.laps, self.stop, self.ops, self.complete = number, base, laps, stop, ops, complete
        self.routed: Sequence[Mapping[int, int]] = ()
        self.experts: Sequence[Sequence[tuple[Stamp, Stamp]]] = ()

    def over(self) -> bool:
        """Return True if the device has reached the end of the step."""
        return isinstance(self.stop, int) or bool(self.stop.query())

    def intervals(self) -> list[tuple[str, int, int]]:
        """Return (state, start, stop) in ns of perf_counter, without gaps. On CUDA the first start is of the host."""
        stamps = [self._ns(stamp) for _, stamp in self.laps] + [self._ns(self.stop)]
        return [
            (state, start, stop)
            for (state, _), start, stop in zip(self.laps, stamps[:-1], stamps[1:], strict=True)
            if stop > start
        ]

    def operations(self) -> list[tuple[str, int, int, int, int]]:
        """Return (kind, stage, micro, start, stop) of a pipeline's operations, with times as in `intervals`.

        See records.PipelineOp.
        """
        return [(op, stage, micro, self._ns(start), self._ns(stop)) for op, stage, micro, start, stop in self.ops]

    def expert_seconds(self) -> list[float]:
        """Return the seconds that the forward passes of this rank's experts took, for each layer."""
        return [sum(self._ns(stop) - self._ns(start) for start, stop in layer) / 1e9 for layer in self.experts]

    def _ns(self, stamp: Stamp) -> int:
        first = self.laps[0][1]
        return int(stamp) if isinstance(first, int) else self.base + round(first.elapsed_time(stamp) * 1e6)


class StepClock:
    """Tracks the state of this process's training thread. It keeps nothing without a training.

    routed, experts: the results of `DataAxis.routed` and `DataAxis.expert_times` in the current step.
    """

    def __init__(self) -> None:
        self.state = OTHER
        self.laps: list[tuple[str, Stamp]] | None = None
        self.ops: list[PipelineOp] = []
        self.routed: Sequence[Mapping[int, int]] = ()
        self.experts: Sequence[Sequence[tuple[Stamp, Stamp]]] = ()
        self._thread = 0
        self._on_device = self._lent = False
        self._complete = True
        self._base = 0
        self._stamp: Callable[[], Stamp] = now
        self.listeners: list[Callable[[StepPhases], None]] = []
        self.listening = True  # see `listens`

    def begin(self, *, on_device: bool = False) -> None:
        """Track the steps that this thread makes from now on. on_device: measure the device's time."""
        self._thread, self._on_device, self._lent = get_ident(), on_device, False
        self._stamp = accelerator().stamp if on_device else now
        self.state = OTHER
        self._open(self._stamp())

    def stamp(self) -> Stamp | None:
        """Return the time of the training thread's work, which may be the device's; None in other threads."""
        return self._stamp() if self.laps is not None and get_ident() == self._thread else None

    @property
    def outside(self) -> bool:
        """Return True between the steps of a training, or without one."""
        return self.laps is None or self.state == OUTSIDE

    @property
    def listens(self) -> bool:
        """Return True if collectives report their ends now.

        They do not in every step, because a thread of the backend has to take the interpreter from the training.
        """
        return self.listening or self.outside

    def end(self) -> None:
        """Stop tracking until `begin`, and drop the states since the last step."""
        self.laps, self.state, self.ops = None, OTHER, []

    def step(self, number: int) -> None:
        """End step `number` and begin the next. Tells the listeners; does nothing if no training has begun."""
        if self.laps is None:
            return
        stop = self._stamp()
        made = StepPhases(number, self._base, self.laps, stop, self.ops, self._complete)
        made.routed, self.routed, made.experts, self.experts = self.routed, (), self.experts, ()
        self._open(stop)
        for tell in self.listeners:
            tell(made)

    def switch(self, state: str) -> str:
        """Enter `state`, and return the state before, for `back`. Inside of "outside" the state does not change."""
        outer = self.state
        if outer != OUTSIDE:
            self.back(state)
        return outer

    def back(self, state: str) -> None:
        """Return to `state`."""
        if self.laps is None or state == self.state:
            return
        if get_ident() != self._thread:
            if not self._lent:
                return
        else:
            # On CUDA, autograd runs in its own thread while the training thread waits for it in "backward". The thread
            # of autograd may then change the state, and must also be able to change it back.
            self._lent = self._on_device and state == "backward"
        if len(self.laps) < _LAPS_AT_MOST:
            self.laps.append((state, self._stamp()))
        else:
            self._complete = False
        self.state = state

    def insert(self, state: str, start: Stamp, stop: Stamp) -> None:
        """Insert a state that is known only afterwards. It lasted from `start` to `stop`, which is now.

        Does nothing if `start` is a time of the host while the device's times are tracked.
        """
        if self.laps is None or isinstance(start, int) is self._on_device:
            return
        if self.state == OUTSIDE or not self._in_charge():
            return
        if len(self.laps) < _LAPS_AT_MOST:
            self.laps += [(state, start), (self.state, stop)]
        else:
            self._complete = False

    def on_op(self, kind: str, stage: int, micro: int) -> Callable[[], None]:
        """Begin an operation of a pipeline. Returns a function to call when the operation is done."""
        start = self._stamp()

        def done() -> None:
            if self.laps is not None and len(self.ops) < _LAPS_AT_MOST:
                self.ops.append((kind, stage, micro, start, self._stamp()))

        return done

    def _open(self, start: Stamp) -> None:
        self.laps, self.ops, self._complete, self._base = [(self.state, start)], [], True, now()

    def _in_charge(self) -> bool:
        return self._lent or get_ident() == self._thread


clock = StepClock()
"""The clock of this process. The training loop calls begin, step and end. All other code uses `phase`."""


class phase:
    """A context manager that puts the training thread in the state `name`: one of PHASES, or a word of the user."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = clock.switch(self._name)

    def __exit__(self, *error: object) -> None:
        clock.back(self._outer)
