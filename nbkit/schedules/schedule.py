"""Pipeline schedules by name: the operations of each rank on each micro-batch, in order.

`register` adds a schedule. nbkit's own schedules are registered in the same way, in builtin.py.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from nbkit.errors import StrategyError
from nbkit.plugins import described

Kind = Literal["F", "B", "I", "W"]


class Op(NamedTuple):
    """An operation on one micro-batch at one stage.

    kind: F is a forward, B a whole backward, I the gradient of the stage's input, W the gradients of its weights. B is
    I followed by W.
    """

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @property
    def in_words(self) -> str:
        """Return the operation for people: "F of stage 1, micro-batch 0"."""
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro}"


def before(op: Op, num_stages: int, *, split: bool) -> tuple[Op, ...]:
    """Return the operations that must come before `op`. split: True if the next stage has I and W instead of B."""
    kind, stage, micro = op
    if kind == "F":
        return (Op("F", stage - 1, micro),) if stage else ()
    if kind == "W":
        return (Op("I", stage, micro),)
    own = Op("F", stage, micro)
    return (own,) if stage == num_stages - 1 else (own, Op("I" if split else "B", stage + 1, micro))


Build = Callable[..., Sequence[Op]]
"""build(ranks, microbatches, rank) -> the operations of one rank, in order."""


@dataclass(frozen=True)
class ScheduleType:
    """A schedule as it was registered; see `register`."""

    name: str
    build: Build
    stages_per_rank: int = 1
    v_shaped: bool = False
    microbatches_per_rank: int = 0
    check: bool = True

    @property
    def is_built_in(self) -> bool:
        """Return True if this is one of nbkit's own schedules."""
        return self.name in built_in

    @property
    def takes_stages(self) -> bool:
        """Return True if a rank can have any number of stages >= `stages_per_rank`."""
        return "stages_per_rank" in inspect.signature(self.build).parameters

    @cached_property
    def splits(self) -> bool:
        """Return True if some backwards are split into I and W."""
        return Schedule.of(self.name, 2, 4).splits

    @cached_property
    def holds_all(self) -> bool:
        """Return True if a rank holds more activations at once with more micro-batches, as in GPipe."""
        few, many = (Schedule.of(self.name, 2, microbatches) for microbatches in (8, 12))
        return most_held(many) > most_held(few)

    def ranks_of_stages(self, ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage, in the order of the model."""
        return tuple(rank_of(stage, ranks, v_shaped=self.v_shaped) for stage in range(ranks * self.stages_per_rank))


_types: dict[str, ScheduleType] = {}
built_in: tuple[str, ...] = ()
"""The names of nbkit's own schedules, which cannot be replaced. builtin.py sets this."""
_CHECKED = [(ranks, microbatches) for ranks in (2, 3, 4) for microbatches in (1, 2, 3, ranks, 2 * ranks + 1)]


def register(
    name: str,
    build: Build,
    *,
    stages_per_rank: int = 1,
    v_shaped: bool = False,
    microbatches_per_rank: int = 0,
    check: bool = True,
) -> None:
    """Add a schedule. Afterwards `pp schedule=NAME` is a strategy. Call this on all ranks.

    build: `build(ranks, microbatches, rank)` returns the operations of one rank, in order. It must work for any number
    of micro-batches from 1 on, because the last batch of an epoch may be short. An operation is an `Op(kind, stage,
    micro)`. The kind is "F" (forward) or "B" (backward). Instead of "B" there can be "I" (gradient of the stage's
    input) and later "W" (gradients of its weights). If `build` has a parameter `stages_per_rank`, it gets the number of
    stages of a rank.

    stages_per_rank: stages on each rank. Stage s is on rank s mod ranks.

    v_shaped: each rank has two stages. Stages go from rank 0 to the last rank and back, so that rank 0 has the first
    and the last stage.

    microbatches_per_rank: the least number of micro-batches for each rank of the pipeline. nbkit refuses a strategy
    with fewer.

    check: check the operations of small pipelines now, and the operations of each pipeline that a strategy uses later.

    Raises StrategyError if an operation is missing or occurs twice, or if the ranks would deadlock. Then nothing is
    registered.

    A second call with the same name replaces the schedule. nbkit's own schedules cannot be replaced.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]*", name):
        raise StrategyError(
            f"{name!r} cannot be the name of a schedule.",
            numbers="lower-case letters, digits and _",
            hint="nbkit.schedules.register('mine', build)",
        )
    if name in built_in:
        raise StrategyError(
            f"The schedule {name!r} is one of nbkit's own.",
            numbers=f"schedules: {' '.join(_types)}",
            hint=f"nbkit.schedules.register('my_{name}', build)",
        )
    if stages_per_rank < 1 or (v_shaped and stages_per_rank != 2):
        raise StrategyError(
            "Each rank of a pipeline needs at least one stage, and a V-shaped schedule needs two.",
            numbers=f"stages_per_rank={stages_per_rank}, v_shaped={v_shaped}",
            hint="stages_per_rank=2, v_shaped=True",
        )
    before_it = _types.get(name)
    add(ScheduleType(name, build, stages_per_rank, v_shaped, microbatches_per_rank, check))
    if not check:
        return
    try:
        for ranks, microbatches in _CHECKED:
            Schedule.of(name, ranks, microbatches)
    except BaseException:
        del _types[name]
        _types.update({name: before_it} if before_it else {})
        _made.cache_clear()
        raise


def add(kind: ScheduleType) -> None:
    """Add a schedule without a check: it was checked where it was registered."""
    _types[kind.name] = kind
    _made.cache_clear()


def names() -> tuple[str, ...]:
    """Return the names of all schedules, nbkit's own first."""
    return tuple(_types)


def type_of(name: str) -> ScheduleType:
    """Return the schedule of that name. Raises StrategyError if there is none."""
    if name not in _types:
        near = difflib.get_close_matches(name, _types, 1)
        raise StrategyError(
            f"{name!r} is not a schedule.",
            numbers=f"schedules: {' '.join(_types)}",
            hint=f"schedule={near[0]}" if near else "schedule=1f1b   or   nbkit.schedules.register(...) on all ranks",
        )
    return _types[name]


def checked_sizes(name: str, ranks: int, microbatches: int) -> list[Schedule]:
    """Return a user's schedule for `microbatches`, and for all smaller numbers; [] for one of nbkit's own.

    A short last batch of an epoch has fewer micro-batches. If there are more than 31, only `microbatches` itself is
    checked here, and a short batch when it comes. Raises StrategyError if one of the schedules is wrong.
    """
    if type_of(name).is_built_in:
        return []
    return [Schedule.of(name, ranks, fewer) for fewer in [*range(1, min(microbatches, 32)), microbatches]]


def registered() -> list[ScheduleType]:
    """Return the schedules that users have registered, since a new rank needs them too."""
    return [each for each in _types.values() if not each.is_built_in]


def rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the rank that holds a stage."""
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


@dataclass(frozen=True)
class Schedule:
    """The operations of every rank of a pipeline, in order.

    name: one of `names()`. ranks: ranks of the pipeline. virtual: stages on each rank. ops: one list for each rank.
    """

    name: str
    ranks: int
    microbatches: int
    virtual: int
    ops: tuple[tuple[Op, ...], ...]

    @classmethod
    def of(cls, name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Schedule:
        """Return the schedule of that name. virtual: stages on each rank, if the schedule can have any number.

        Any number of micro-batches >= 1 is allowed. Raises StrategyError for an unknown name, and for a number of
        stages that the schedule cannot have.
        """
        kind = type_of(name)
        if ranks < 1 or microbatches < 1:
            raise StrategyError(
                "A pipeline needs at least one rank and one micro-batch.",
                numbers=f"{ranks} ranks, {microbatches} micro-batches",
                hint="pp=2 microbatches=4",
            )
        default = kind.stages_per_rank
        virtual = default if virtual is None else virtual
        if virtual < default or (virtual != default and not kind.takes_stages):
            raise StrategyError(
                f"The schedule {name!r} cannot have {virtual} stages on each rank.",
                numbers=f"{name}: {default}{' or more' if kind.takes_stages else ''}",
                hint=f"Schedule.of({name!r}, {ranks}, {microbatches})",
            )
        return _made(name, ranks, microbatches, virtual)

    def with_microbatches(self, microbatches: int) -> Schedule:
        """Return the same schedule for another number of micro-batches, such as that of a short last batch."""
        return Schedule.of(self.name, self.ranks, microbatches, self.virtual)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return self.ranks * self.virtual

    @property
    def v_shaped(self) -> bool:
        """Return True if stages run down the ranks and up again, so that the first and the last are on rank 0."""
        return type_of(self.name).v_shaped

    @property
    def splits(self) -> bool:
        """Return True if some backwards are split into I and W."""
        return any(op.kind == "I" for ops in self.ops for op in ops)

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that holds `stage`."""
        return rank_of(stage, self.ranks, v_shaped=self.v_shaped)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in the order in which a micro-batch passes them."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def most_held(schedule: Schedule) -> int:
    """Return the largest number of activations that any rank holds at once. Each stage of a micro-batch counts."""
    return max(peak_of(ops) for ops in schedule.ops)


def peak_of(ops: Sequence[Op]) -> int:
    """Return the largest number of activations held at once by a rank with these operations: from F to B or W."""
    held = peak = 0
    for op in ops:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        peak = max(peak, held)
    return peak


def check_lists(schedule: Schedule) -> None:
    """Raise StrategyError if the lists are wrong.

    This is so if an operation is missing, twice there, or on the wrong rank, or if the ranks would wait for each other
    forever.
    """
    split = check_complete(schedule)
    done: set[Op] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops) and done.issuperset(
                before(op := ops[at[rank]], schedule.num_stages, split=(op.stage + 1, op.micro) in split)
            ):
                done.add(op)
                at[rank] += 1
                moved = True
    check_done(schedule, at)


def check_done(schedule: Schedule, done: Sequence[int]) -> None:
    """Raise StrategyError if a rank could not do all its operations. done: the number that each rank could do."""
    counts = enumerate(zip(done, schedule.ops, strict=True))
    stuck = [f"rank {rank} before {ops[n].in_words}" for rank, (n, ops) in counts if n < len(ops)]
    if stuck:
        raise StrategyError(
            f"Under the schedule {schedule.name}, ranks would wait for each other forever.",
            numbers="; ".join([_sizes(schedule), *stuck]),
        )


def _sizes(schedule: Schedule) -> str:
    return f"{schedule.ranks} ranks, {schedule.microbatches} micro-batches"


def check_complete(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the pairs (stage, micro) whose backward is split.

    Raises StrategyError if an operation is missing, twice there, or on the wrong rank.
    """
    seen: set[Op] = set()
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if op.kind not in ("F", "B", "I", "W") or not 0 <= op.micro < schedule.microbatches:
                why = "which does not exist"
            elif not 0 <= op.stage < schedule.num_stages or schedule.rank_of(op.stage) != rank:
                why = "whose stage it does not hold"
            else:
                why = "twice" * (op in seen)
            if why:
                said = f"{schedule.name}: rank {rank} has {op.in_words}, {why}."
                raise StrategyError(said, numbers=f"{_sizes(schedule)}; kinds: F, B, or I and W")
            seen.add(op)
    split = {(op.stage, op.micro) for op in seen if op.kind == "I"}
    for stage in range(schedule.num_stages):
        for micro in range(schedule.microbatches):
            kinds = "FIW" if (stage, micro) in split else "FB"
            present = "".join(kind for kind in "FBIW" if Op(kind, stage, micro) in seen)  # type: ignore[arg-type]
            if present != kinds:
                raise StrategyError(
                    f"Under the schedule {schedule.name}, stage {stage} on rank {schedule.rank_of(stage)} does not do "
                    f"all operations of micro-batch {micro}.",
                    numbers=f"{_sizes(schedule)}: it has {present or 'nothing'}, expected {kinds}",
                )
    return split


@lru_cache(maxsize=1024)
def _made(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    kind = type_of(name)
    more = {"stages_per_rank": virtual} if kind.takes_stages else {}
    if kind.is_built_in or not kind.check:
        lists = [kind.build(ranks, microbatches, rank, **more) for rank in range(ranks)]
        return Schedule(name, ranks, microbatches, virtual, tuple(map(tuple, lists)))
    found = [_list_of(kind, ranks, microbatches, rank, more) for rank in range(ranks)]
    made = Schedule(name, ranks, microbatches, virtual, tuple(found))
    check_lists(made)
    return made


def _list_of(kind: ScheduleType, ranks: int, microbatches: int, rank: int, more: dict[str, int]) -> tuple[Op, ...]:
    """Return the list of a user's schedule for one rank. Raises StrategyError if `build` does not return one."""
    called = f"build({ranks}, {microbatches}, {rank})"
    hint = "def build(ranks, microbatches, rank): return [Op('F', rank, 0), Op('B', rank, 0), ...]"
    try:
        ops = kind.build(ranks, microbatches, rank, **more)
    except StrategyError:
        raise
    except Exception as error:
        raise StrategyError(
            f"The schedule {kind.name!r} raised an error.",
            numbers=f"{called}: {described(error)}",
            hint=hint,
        ) from error
    if not isinstance(ops, Sequence) or not all(isinstance(op, tuple) and len(op) == 3 for op in ops):
        shown = repr(ops) if len(repr(ops)) <= 80 else type(ops).__name__
        raise StrategyError(
            f"The schedule {kind.name!r} did not return a list of Op.", numbers=f"{called}: {shown}", hint=hint
        )
    return tuple(Op(*op) for op in ops)
