"""Find the rank that the others wait for, and why, from the bars of all ranks.

A rank is late when what it does itself takes longer than on the ranks that do the same, and those stand still for as
long. Ranks that do the same are those along dp, cp and tp. The stages of a pipeline do not: a rank that has more to do
than those of other stages is named only when none is late beside its equals. Where nobody has more to do, but some
ranks' own transfers take longer, these ranks are named, all that stand at the same slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

_OWN = ("data", "compute", "optimizer", "other")
_SHARE = 0.5  # of what the others wait, that a cause must explain


@dataclass(frozen=True)
class Bar:
    """Seconds of one rank's step; everything but `seconds` adds up to it.

    exposed: standing still while data was on its way. waiting: standing still because another rank of the group was not
    there yet. bubble: idle in the pipeline's schedule. other: what was in none of the rest.
    peers: the ranks that do the same work, itself among them; empty where that is not known.
    """

    rank: int
    seconds: float
    compute: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    peers: tuple[int, ...] = ()

    @property
    def idle(self) -> float:
        """Seconds in which it waited for another rank."""
        return self.waiting + self.bubble

    @property
    def own(self) -> float:
        """Seconds of what it does itself."""
        return self.data + self.compute + self.optimizer + self.other


@dataclass(frozen=True)
class Late:
    """The rank the others wait for. seconds: by how much, per step. cause: the part of its step that is longer.

    beside: the other ranks at the same slow link, where the cause is "exposed". took: seconds of that part on it;
    twins_took on its twins, the ranks that do the same work, 0 where there are none; others_took on the ranks that do
    other work, or on all others where its twins are as late. They are as long as the bars they come from.
    """

    rank: int
    seconds: float
    cause: str
    beside: tuple[int, ...] = ()
    took: float = field(default=0.0, compare=False)
    twins: tuple[int, ...] = field(default=(), compare=False)
    twins_took: float = field(default=0.0, compare=False)
    others_took: float = field(default=0.0, compare=False)

    @property
    def alone(self) -> bool:
        """Whether its twins are not as late, so that its share of the work is not what makes it so."""
        return bool(self.twins) and self.took - self.twins_took >= self.seconds / 2

    @property
    def longer(self) -> float:
        """Seconds that the part takes more than on its twins, or elsewhere where these are as late.

        The difference of both as they are shown, of three digits: who subtracts them finds it.
        """
        return _shown(self.took) - _shown(self.twins_took if self.alone else self.others_took)


def _shown(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def late_rank(of: Sequence[Bar], *, at_least: float = 0.05) -> Late | None:
    """The rank the others wait for, when the median of them idles `at_least` of a step longer than it does."""
    if len(of) < 2:
        return None
    floor = at_least * median(bar.seconds for bar in of)
    by_peers: dict[tuple[int, ...], list[Bar]] = {}
    for bar in of:
        by_peers.setdefault(bar.peers, []).append(bar)
    found = [late for those in by_peers.values() if (late := _late_among(those, floor)) is not None]
    overall = _late_among(of, floor)
    if overall is not None and (not found or overall.cause == "exposed"):
        found.append(overall)
    late = max(found, key=lambda late: late.seconds, default=None)
    return _beside_others(late, of) if late is not None else None


def _beside_others(late: Late, of: Sequence[Bar]) -> Late:
    by_rank = {bar.rank: bar for bar in of}
    here = by_rank[late.rank]
    twins = [by_rank[rank] for rank in here.peers if rank in by_rank and rank not in (late.rank, *late.beside)]
    others = [bar for bar in of if bar.rank not in (late.rank, *late.beside)]
    rest = [bar for bar in others if bar not in twins] or others

    def usual(bars: Sequence[Bar]) -> float:
        return median(getattr(bar, late.cause) for bar in bars) if bars else 0.0

    return replace(
        late,
        took=getattr(here, late.cause),
        twins=tuple(bar.rank for bar in twins),
        twins_took=usual(twins),
        others_took=usual(rest),
    )


def _late_among(of: Sequence[Bar], floor: float) -> Late | None:
    if len(of) < 2:
        return None
    first = min(of, key=lambda bar: bar.idle)
    others = [bar for bar in of if bar is not first]
    behind = median(bar.idle for bar in others) - first.idle
    if behind <= floor:
        return None
    if first.own - median(bar.own for bar in others) >= _SHARE * behind:
        excess = {part: getattr(first, part) - median(getattr(bar, part) for bar in others) for part in _OWN}
        return Late(first.rank, behind, max(excess, key=lambda part: excess[part]))
    # Nobody has more to do: some of them stand longer for transfers of their own, and the rest for them.
    usual = min(bar.exposed for bar in others)
    if first.exposed - usual < _SHARE * behind:
        return None
    beside = tuple(bar.rank for bar in others if bar.exposed - usual >= _SHARE * behind)
    return Late(first.rank, behind, "exposed", beside)
