"""A plan as a value: its rows, the best first, and those that were refused with the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbkit.planner.peak.peak import Peak
from nbkit.planner.step.step_time import Parts


@dataclass(frozen=True)
class Row:
    """A strategy that fits.

    strategy: as one types it. microbatch_size: rows of a forward where there is no pipeline. recompute: of the blocks.
    peak: bytes of the fullest rank. seconds: of a step, and by part; low, high: between which they are. sent: bytes
    that the busiest rank sends in a step, by axis; between: of these, along axes that cross nodes. rate: of samples
    or, where a sample has positions, of tokens per second. limit: what takes longest. levers: seconds of the same with
    a key of nbkit/levers.py, where a link is waited for that it would relieve; what they compute is not what one
    process does.
    """

    strategy: str
    label: str
    microbatch_size: int | None
    recompute: bool
    peak: Peak
    seconds: float
    low: float
    high: float
    parts: Parts
    sent: dict[str, float]
    rate: float
    device_seconds_per_million: float
    limit: str
    levers: Mapping[str, float] = field(default_factory=dict)
    between: float = 0.0

    @property
    def settings(self) -> str:
        """All that a Trainer is given, in a line."""
        words = [self.strategy] + [f"microbatch_size={self.microbatch_size}"] * (self.microbatch_size is not None)
        return " ".join(words + ["recompute"] * self.recompute)


@dataclass(frozen=True)
class Words:
    """Shows as the text that it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Refused:
    """A strategy that does not fit. why: one sentence; numbers: the arithmetic."""

    strategy: str
    why: str
    numbers: str


@dataclass(frozen=True)
class Plan:
    """What `nbkit.plan` gives. rows: the best first, which is the recommendation. considered: strategies in all.

    on: the hardware. memory: bytes of a device, of which `usable` are counted on. unit: of rates, "tokens" or "rows".
    """

    model: str
    batch: int
    on: str
    devices: int
    memory: float
    usable: float
    unit: str
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    considered: int

    def why(self, first: str, second: str) -> Words:
        """What two rows differ in, part by part. Raises UsageError for a strategy that has no row."""
        from nbkit.planner.choose.table import why

        return Words(why(self, first, second))

    def __repr__(self) -> str:
        from nbkit.planner.choose.table import text

        return text(self)

    def _repr_html_(self) -> str:
        from nbkit.planner.choose.table import page

        return page(self)
