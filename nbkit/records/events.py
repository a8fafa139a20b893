"""The events of a job as frozen values: steps, switches, checkpoints, failures, the begin and end of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from nbkit.records.event_words import resized


@dataclass(frozen=True)
class Event:
    """The base of all events. step: the number of finished steps when it happened."""

    kind: ClassVar[str] = ""
    step: int

    def as_dict(self) -> dict[str, Any]:
        """Return the event as sinks get it and as it is written: {"kind": ..., "step": ..., ...}."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class StepDone(Event):
    """A finished step. `record` is the entry of `history`: loss, lr, seconds, tokens, ..."""

    kind: ClassVar[str] = "step"
    record: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the event with the numbers of its record beside its kind and step."""
        return {"kind": self.kind, "step": self.step, **self.record}


@dataclass(frozen=True)
class RunStarted(Event):
    """A run began.

    arithmetic: how the global batch is divided, such as "global 64 = micro 4 x accum 8 x dp 2". total: the number of
    steps to make, 0 if not known. about: model, optimizer, devices, versions and similar facts, as text.
    """

    kind: ClassVar[str] = "run_started"
    strategy: str = ""
    arithmetic: str = ""
    total: int = 0
    about: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStopped(Event):
    """A run ended. `reason`: "done", "stopped", or the name of the error that ended it."""

    kind: ClassVar[str] = "run_stopped"
    reason: str = "done"


@dataclass(frozen=True)
class LrChanged(Event):
    """The learning rate was set by hand."""

    kind: ClassVar[str] = "lr_changed"
    old: float = 0.0
    new: float = 0.0


@dataclass(frozen=True)
class LiveCell(Event):
    """A live cell ran between two steps. what: the first line of the cell. seconds: how long the training waited for
    it."""

    kind: ClassVar[str] = "live_cell"
    what: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpointed(Event):
    """State was written to, or read from, `path`. action: "saved" or "loaded". before: for a load, the number of steps
    that the training had finished until then."""

    kind: ClassVar[str] = "checkpoint"
    path: str = ""
    action: str = "saved"
    before: int = 0


@dataclass(frozen=True)
class Switched(Event):
    """The strategy changed. moved_bytes: bytes that all ranks together sent.

    beside_s: seconds of preparation in another thread during steps of the old strategy. They are not part of the pause.
    pause_s: seconds without a step, not including proof_s. proof_s: seconds in which the training waited for the
    comparison of old and new state. prepare_s: the part of pause_s before anything moved. identical: True if weights
    and optimizer state are the same as before; None if not compared. in_place: True if the old and the new state did
    not fit into memory together. Then nbkit replaced tensors one by one.
    """

    kind: ClassVar[str] = "switch"
    old: str = ""
    new: str = ""
    moved_bytes: int = 0
    beside_s: float = 0.0
    prepare_s: float = 0.0
    pause_s: float = 0.0
    proof_s: float = 0.0
    identical: bool | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Rebalanced(Event):
    """nbkit has divided the work again, because ranks are slower or faster than assumed, or experts get unequal work.

    speeds: relative speed of each rank. gain: expected saving, as a share of the compute seconds of a step. experts:
    number of experts that have moved to another rank, in all layers together.
    """

    kind: ClassVar[str] = "rebalanced"
    speeds: str = ""
    gain: float = 0.0
    experts: int = 0


@dataclass(frozen=True)
class Replaced(Event):
    """Ranks died, new processes took their places, and the training continued.

    ranks: numbers of these ranks, such as "1, 2". why: the reason, such as "rank 2 died (SIGKILL)". steps_lost: number
    of finished steps that were repeated. seconds: time from the death until the next step could begin. devices: a text
    such as "rank 2 is on the spare GPU 3 now, since ..."; "" if the new processes use the devices of the old ones.
    """

    kind: ClassVar[str] = "replaced"
    ranks: str = ""
    why: str = ""
    steps_lost: int = 0
    seconds: float = 0.0
    devices: str = ""

    @property
    def said(self) -> str:
        """A sentence about the event, and one about a new device."""
        were = "were" if "," in self.ranks else "was"
        lost = f"{self.steps_lost} step{'s' * (self.steps_lost != 1)}"
        return (
            f"R{self.why[1:]} in step {self.step + self.steps_lost + 1} and {were} replaced: "
            f"{lost} and {self.seconds:.1f} s lost."
        ) + (f" R{self.devices[1:]}." if self.devices else "")


@dataclass(frozen=True)
class Resized(Event):
    """The training continues with another number of ranks.

    old: the strategy before. new: the strategy after. moved_bytes: bytes that all ranks together sent. pause_s: seconds
    without a step.
    """

    kind: ClassVar[str] = "resized"
    old_ranks: int = 0
    ranks: int = 0
    old: str = ""
    new: str = ""
    moved_bytes: int = 0
    pause_s: float = 0.0

    @property
    def said(self) -> str:
        """A sentence about the event."""
        return f"{resized(asdict(self))}."


@dataclass(frozen=True)
class OutOfMemory(Event):
    """A step ran out of memory and was undone. A second event has the setting with which the training continues.

    rank: the rank that ran out of memory; None if several did. what: the first line of the error, and causes that nbkit
    found. changes: the changed settings, such as "microbatch_size=4"; "" in the first event. old_peak: predicted peak
    bytes with the old setting, of the rank that needs most. peak: predicted peak bytes with the new setting. room:
    bytes that this rank can hold. step_s: predicted seconds of a step with the new setting; 0: not known. seconds:
    seconds until the step is made again.
    """

    kind: ClassVar[str] = "out_of_memory"
    rank: int | None = None
    what: str = ""
    changes: str = ""
    old_peak: int = 0
    peak: int = 0
    room: int = 0
    step_s: float = 0.0
    seconds: float = 0.0

    @property
    def said(self) -> str:
        """A sentence about the event."""
        sizes = ""
        if self.peak and self.room:
            before = f", {self.old_peak / 1e6:,.4g} MB before" if self.old_peak else ""
            sizes = f" ({self.peak / 1e6:,.4g} MB at the peak{before}; {self.room / 1e6:,.4g} MB are there)"
        if self.step_s:
            sizes += f", ≈ {self.step_s * 1e3:.3g} ms a step"
        return f"Out of memory in step {self.step + 1}, which is made again with {self.changes}{sizes}: {self.what}"


@dataclass(frozen=True)
class Failed(Event):
    """An error ended a run, or a switch failed and the old strategy continued.

    rank: the rank where the error began; None if all ranks had the same error, or if the rank is not known. error: the
    name of the error's class; "" on a rank that did not raise the error itself. what: the first line of the error.
    """

    kind: ClassVar[str] = "failure"
    rank: int | None = None
    error: str = ""
    what: str = ""
