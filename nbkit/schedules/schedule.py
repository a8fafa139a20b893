"""A pipeline schedule by name: the lists of operations of all ranks, and where each stage lives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nbkit.errors import StrategyError
from nbkit.schedules import gpipe_1f1b
from nbkit.schedules.ops import Op
from nbkit.schedules.zero_bubble import zero_bubble

NAMES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")

_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 2, "zbv": 2, "dualpipev": 2}
_V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does, in order.

    name: one of NAMES. ranks: of the pipeline. virtual: stages on each rank. ops: for each rank its list.
    """

    name: str
    ranks: int
    microbatches: int
    virtual: int
    ops: tuple[tuple[Op, ...], ...]

    @classmethod
    def of(cls, name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Schedule:
        """The schedule of that name. virtual: stages on each rank, for interleaved and zb (default 2).

        Any number of micro-batches >= 1 is allowed. Raises StrategyError for another name, and for stages that
        the schedule cannot have.
        """
        if name not in NAMES:
            raise StrategyError(
                f"{name!r} is not a schedule.", numbers=f"schedules: {' '.join(NAMES)}", hint="schedule=1f1b"
            )
        if ranks < 1 or microbatches < 1:
            raise StrategyError(
                "A pipeline has at least one rank and one micro-batch.",
                numbers=f"{ranks} ranks, {microbatches} micro-batches",
                hint="pp=2 microbatches=4",
            )
        default = _STAGES_PER_RANK[name]
        virtual = default if virtual is None else virtual
        if virtual < default or (virtual != default and name not in ("interleaved", "zb")):
            raise StrategyError(
                f"The schedule {name!r} cannot have {virtual} stages on each rank.",
                numbers=f"{name}: {default}{' or more' if name in ('interleaved', 'zb') else ''}",
                hint=f"Schedule.of({name!r}, {ranks}, {microbatches})",
            )
        return _made(name, ranks, microbatches, virtual)

    def with_microbatches(self, microbatches: int) -> Schedule:
        """The same schedule for another number of micro-batches, such as those of a short last batch."""
        return Schedule.of(self.name, self.ranks, microbatches, self.virtual)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * self.virtual

    @property
    def v_shaped(self) -> bool:
        """Whether stages run down the ranks and up again, so that the first and the last are on rank 0."""
        return self.name in _V_SHAPED

    @property
    def splits(self) -> bool:
        """Whether some backwards are split into I and W."""
        return any(op.kind == "I" for ops in self.ops for op in ops)

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that holds `stage`."""
        return _place(stage, self.ranks, v_shaped=self.v_shaped)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in the order in which a micro-batch passes them."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def _place(stage: int, ranks: int, *, v_shaped: bool) -> int:
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


@lru_cache(maxsize=256)
def _made(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    every = range(ranks)
    lists: list[list[Op]]
    if name == "gpipe":
        lists = [gpipe_1f1b.gpipe(ranks, microbatches, rank) for rank in every]
    elif name == "1f1b":
        lists = [gpipe_1f1b.one_f_one_b(ranks, microbatches, rank) for rank in every]
    elif name == "interleaved":
        lists = [gpipe_1f1b.interleaved(ranks, microbatches, rank, virtual) for rank in every]
    elif name == "dualpipev":
        lists = [gpipe_1f1b.dualpipev(ranks, microbatches, rank) for rank in every]
    else:
        lists = zero_bubble(ranks, microbatches, virtual, lambda s: _place(s, ranks, v_shaped=name == "zbv"))
    return Schedule(name, ranks, microbatches, virtual, tuple(map(tuple, lists)))
