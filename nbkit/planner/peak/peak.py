"""Bytes that a rank holds at the peak of a step, with activations: the sum that panel, plan and switch share.

What is there all the time (nbkit/planner/memory.py), and on top of it, at each moment of a step, what the pieces keep
and take (activations.py) and what the data axis has under way:

    zero 0      gradients arrive beside the buffers of their bucket, and move into those when it is complete
    two levels  of up to three buckets, the copy that is summed within the node and between (nbkit.node_levels); of the
                newest, over gloo, what is received for it
    zero 1, 2   of up to two buckets, the copy that is being reduced, and over gloo what is received for it; after the
                update, of two, what is gathered
    int8        what rounding takes off gradients, kept for the next step (nbkit/levers.py)
    sync_every  under Adam and its like the weights of the last average, and how they move; counted of all optimizers
    zero 3      the unit that computes, whole; the next one, arriving; of up to two, gradients being reduced; the root
    a pipeline  gradients of a whole stage beside the buffers; of each micro-batch under way, what its stages keep;
                hidden states that arrive for the next operations; from an I to its W also the gradients behind each
                layer. With zero 3 all its units are whole throughout

Left out: the batch itself, what kernels and communication libraries take for themselves, and an allocator's gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from nbkit.levers import buckets
from nbkit.planner.memory import Rest
from nbkit.planner.peak.activations import Piece, Updating, most
from nbkit.planner.stage_partition import ranks_of_stages
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy

_POSTED = 2


@dataclass(frozen=True)
class Weights:
    """Bytes of the parameters of a piece on a rank, whole along the data axis, one by one in the order of their use.

    inside: of the piece's block. outside: of what is before the first or behind the last one, trained or not. partial:
    bytes of those whose gradients are sums over tp or cp. less_inside, less_outside: by which zero 3 gathers less,
    since some are cast before.
    """

    inside: tuple[int, ...]
    outside: tuple[int, ...] = ()
    partial: int = 0
    less_inside: int = 0
    less_outside: int = 0

    @property
    def total(self) -> int:
        """Of all."""
        return sum(self.inside) + sum(self.outside)

    @property
    def gathered(self) -> int:
        """Of all, as zero 3 gathers them."""
        return self.total - self.less_inside - self.less_outside

    @property
    def gathered_inside(self) -> int:
        """Of those of the piece's block."""
        return sum(self.inside) - self.less_inside


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at its highest moment, by what they are for.

    activations: what forward keeps for backward. working: everything else that is there for a moment: what computing
    and updating take, gradients on their way, parameters that are gathered. moment: "forward", "backward", "sum",
    "update" or "gather".
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    moment: str

    @property
    def total(self) -> int:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


@dataclass(frozen=True)
class _Moment:
    """gradients: on one data rank, those that are there; on several they have buffers all the time."""

    name: str
    kept: float
    working: float
    gradients: float = 0.0

    @property
    def total(self) -> float:
        return self.kept + self.working + self.gradients


def peak(
    strategy: Strategy,
    place: int,
    pieces: Sequence[Piece],
    weights: Sequence[Weights],
    ranges: Sequence[tuple[int, int]],
    rest: Rest,
    *,
    rows: float,
    micros: int = 1,
    updating: Updating | None = None,
    buffers: int = 0,
    received: bool = False,
    levels: int = 1,
) -> Peak:
    """Of the rank at `place` along pp.

    pieces: as this strategy's tensor and context axes leave them. weights: of each piece. ranges: of pieces that the
    rank holds, one for each of its stages; all of them without a pipeline. rest: what it holds at rest. rows: of a
    micro-batch, the largest. micros: forwards of a step. buffers: bytes of the module's buffers. received: whether a
    reduce-scatter holds what other ranks send it beside what it sends, as over gloo. levels: ranks of a node over which
    gradients are summed before they are between nodes; 1: in one level.
    """
    step = _Step(strategy, place, pieces, weights, ranges, rest, rows, micros, updating or Updating(), received, levels)
    highest = max(step.moments(), key=lambda moment: moment.total)
    # What rounding takes off is kept: of a rank's gradients, and of the sums that it makes.
    kept = rest.gradients * (1 + 1 / strategy.dp) if strategy.levers.compress == "int8" else 0.0
    kept += 2.0 * rest.gradients * (strategy.levers.sync_every > 1)
    return Peak(
        rest.parameters + buffers,
        rest.gradients if strategy.dp > 1 else round(highest.gradients),
        rest.optimizer,
        round(highest.kept),
        round(highest.working + kept),
        highest.name,
    )


@dataclass(frozen=True)
class _Step:
    strategy: Strategy
    place: int
    pieces: Sequence[Piece]
    weights: Sequence[Weights]
    ranges: Sequence[tuple[int, int]]
    rest: Rest
    rows: float
    micros: int
    updating: Updating
    received: bool
    levels: int

    def moments(self) -> Iterator[_Moment]:
        """Above parameters, optimizer state and, on several data ranks, the buffers of gradients."""
        if self.strategy.pp > 1:
            yield from self._pipeline()
        else:
            yield from self._passes()
        yield from self._after()

    @property
    def _own(self) -> list[int]:
        return [i for start, stop in self.ranges for i in range(start, stop)]

    @property
    def _gradients(self) -> float:
        """Of all that this rank computes with, whole along the data axis."""
        return float(sum(self.weights[i].total for i in self._own))

    def _after(self) -> Iterator[_Moment]:
        alone = float(self.rest.gradients) if self.strategy.dp == 1 else 0.0
        share = self.strategy.shard if self.strategy.zero else 1
        own = [size for i in self._own for size in (*self.weights[i].inside, *self.weights[i].outside)]
        if partial := sum(self.weights[i].partial for i in self._own):
            yield _Moment("sum", 0.0, partial / share, alone)
        of = self.updating
        yield _Moment("update", 0.0, (of.largest * max(own, default=0) + of.all * sum(own)) / share, alone)
        if self.strategy.zero in (1, 2):
            sizes = sorted((sum(bucket) for bucket in buckets(own[::-1], self.strategy.levers.bucket)), reverse=True)[
                :2
            ]
            yield _Moment("gather", 0.0, sum(sizes) * (1 + 1 / self.strategy.shard))

    def _passes(self) -> Iterator[_Moment]:
        """Forward and backward without a pipeline."""
        rows, count, alone = self.rows, len(self.pieces), self.strategy.dp == 1
        kept = [0.0, *accumulate(piece.kept.at(rows) for piece in self.pieces)]
        # With several micro-batches, the gradients of those before are there.
        before = self._gradients if self.micros > 1 and self.strategy.dp == 1 else 0.0
        for i, piece in enumerate(self.pieces):
            yield _Moment("forward", kept[i], self._gathered(i) + most(piece.forward, rows), before)
        fresh, under_way = before, [0.0, 0.0]
        for i in reversed(range(count)):
            sizes, own = self.weights[i], self.pieces[i].kept.at(rows)
            top = most(self.pieces[i].backward, rows)
            yield _Moment(
                "backward",
                kept[i] + min(own, top),
                (0.0 if alone else fresh) + max(top - own, 0.0) + self._gathered(i, backward=True) + sum(under_way),
                fresh if alone else 0.0,
            )
            if not before:
                fresh += sizes.total
            if self.strategy.zero == 3:
                inside = float(sum(sizes.inside))
                reduced = self._reduced(inside)
                yield _Moment("backward", kept[i], fresh + self._root + reduced + under_way[1])
                fresh, under_way = fresh - inside, [under_way[1], reduced]
            elif self.strategy.dp > 1:
                for bucket in self._complete(i):
                    if self._in_levels:
                        yield _Moment("backward", kept[i], fresh - bucket + self._summed(bucket, under_way))
                        under_way = [under_way[1], bucket]
                    elif self.strategy.zero:
                        reduced = self._reduced(bucket)
                        # They are copied, and go, before any is received.
                        yield _Moment("backward", kept[i], fresh + max(bucket, reduced - bucket) + under_way[1])
                        under_way = [under_way[1], reduced]
                    fresh -= bucket
        if self.strategy.zero == 3:
            yield _Moment("backward", 0.0, fresh + self._reduced(fresh) + self._root + under_way[1])

    def _reduced(self, size: float) -> float:
        """Bytes while gradients of `size` are reduce-scattered: a copy of them, and what is received, which between two
        ranks is the half that is kept (nbkit/rank/comm/gloo/reduce_scatter.py)."""
        ranks = self.levels if self._in_levels else self.strategy.shard
        return size * (1 + self.received * (0.5 if ranks == 2 else 1))

    @property
    def _in_levels(self) -> bool:
        """Whether all gradients are all-reduced, in two levels."""
        return self.levels > 1 and not self.strategy.zero and not self.strategy.levers.compress

    def _summed(self, newest: float, others: Sequence[float]) -> float:
        """Bytes while buckets are summed in two levels. others: the two before the newest, whose part is being made."""
        made = [newest] * (self.received and self.levels > 2) + [*others[:1]]  # of the oldest, it is on its way back
        return self._reduced(newest) + sum(others) + sum(made) / self.levels

    @property
    def _root(self) -> float:
        return float(sum(sum(self.weights[i].outside) - self.weights[i].less_outside for i in self._own))

    def _gathered(self, i: int, *, backward: bool = False) -> float:
        """Whole parameters beside the shards while piece i computes, and those that arrive for the next one."""
        if self.strategy.zero < 3:
            return 0.0
        beside = i - 1 if backward else i + 1
        arriving = self.weights[beside].gathered_inside if 0 <= beside < len(self.weights) else 0
        return self._root + self.weights[i].gathered_inside + arriving

    def _complete(self, i: int) -> list[float]:
        """Bytes of the buckets that are complete after the backward of piece i, and were not before."""
        order = [(size, j) for j in reversed(range(len(self.weights))) for size in _all(self.weights[j])[::-1]]
        found, at = [], 0
        for bucket in buckets([size for size, _ in order], self.strategy.levers.bucket):
            at += len(bucket)
            if order[at - 1][1] == i:
                found.append(float(sum(bucket)))
        return found

    def _pipeline(self) -> Iterator[_Moment]:
        """The operations of this rank, with what its stages keep."""
        rows, total, alone = self.rows, self._gradients, self.strategy.dp == 1
        stages = [_stage(self.pieces, self.weights, lo, hi, rows) for lo, hi in self.ranges]
        schedule = _schedule(self.strategy.schedule or "1f1b", self.strategy.pp, self.micros)
        homes = ranks_of_stages(self.strategy)
        numbers = [stage for stage, rank in enumerate(homes) if rank == self.place]
        gathered = float(sum(self.weights[i].gathered for i in self._own))
        whole = gathered if self.strategy.zero == 3 else 0.0
        arrives = self._arriving(homes, dict(zip(numbers, stages, strict=True)))
        kept, made = 0.0, False
        ops = schedule.ops[self.place]
        posted = [arrives.get((kind, number), 0.0) for kind, number, _ in ops]
        for index, (kind, number, _) in enumerate(ops):
            stage = stages[numbers.index(number)]
            coming = sum(posted[index + 1 : index + 1 + _POSTED])
            made_now = total if made else 0.0
            own, extra = (made_now, whole + coming) if alone else (0.0, whole + coming + made_now)
            if kind == "F":
                yield _Moment("forward", kept, extra + stage.received + stage.forward, own)
                kept += stage.kept
            elif kind == "W":
                yield _Moment("backward", kept, extra + stage.weights, own)
                kept -= stage.kept + stage.deferred
            else:
                deferred = stage.deferred if kind == "I" else 0.0
                top = stage.again if made else stage.backward
                yield _Moment(
                    "backward", kept, extra + stage.handed + deferred + max(top + stage.received - stage.kept, 0.0), own
                )
                made, kept = True, kept + deferred
                if kind == "B":
                    kept -= stage.kept
        if self._in_levels:
            every = [size for i in self._own for size in _all(self.weights[i])]
            cut = sorted((sum(bucket) for bucket in buckets(every[::-1], self.strategy.levers.bucket)), reverse=True)
            yield _Moment("backward", 0.0, self._summed(cut[0], cut[1:3]))
        elif self.strategy.zero in (1, 2):
            every = [size for i in self._own for size in _all(self.weights[i])]
            sizes = sorted((sum(bucket) for bucket in buckets(every[::-1], self.strategy.levers.bucket)), reverse=True)[
                :2
            ]
            yield _Moment("backward", 0.0, (total if self.strategy.zero == 2 else 0.0) + self._reduced(sum(sizes)))
        elif self.strategy.zero == 3:
            largest = max(sum(self.weights[i].inside) for i in self._own)
            yield _Moment("backward", 0.0, total + gathered + self._reduced(largest))

    def _arriving(self, homes: Sequence[int], stages: Mapping[int, _Stage]) -> dict[tuple[str, int], float]:
        """Bytes of what another rank sends for an operation, by its kind and stage."""
        found = {}
        for number, stage in stages.items():
            if number and homes[number - 1] != self.place:
                found["F", number] = stage.received
            if number + 1 < len(homes) and homes[number + 1] != self.place:
                found["B", number] = found["I", number] = stage.handed
        return found


@dataclass(frozen=True)
class _Stage:
    """forward, backward: at the highest moment, above what was there before its forward. again: of a backward that
    adds to gradients. received, handed: what comes from the stage before, and from the one behind it. deferred: from
    an I to its W; weights: of the largest gradient that a W makes."""

    forward: float
    kept: float
    backward: float
    again: float
    received: float
    handed: float
    deferred: float
    weights: float


def _stage(pieces: Sequence[Piece], weights: Sequence[Weights], lo: int, hi: int, rows: float) -> _Stage:
    kept = [0.0, *accumulate(pieces[i].kept.at(rows) for i in range(lo, hi))]
    received = pieces[lo - 1].carried.at(rows) if lo else 0.0
    handed = pieces[hi - 1].carried.at(rows) if hi < len(pieces) else 0.0
    backward = again = made = 0.0
    for i in reversed(range(lo, hi)):
        top = kept[i - lo] + most(pieces[i].backward, rows)
        backward = max(backward, top + made)
        again = max(again, top - weights[i].total + max(_all(weights[i]), default=0))
        made += weights[i].total
    forward = max(kept[i - lo] + most(pieces[i].forward, rows) for i in range(lo, hi))
    deferred = sum(pieces[i].deferred.at(rows) for i in range(lo, hi))
    largest = max(max(_all(weights[i]), default=0) for i in range(lo, hi))
    return _Stage(forward, kept[-1] + received - handed, backward, again, received, handed, deferred, largest)


def _all(weights: Weights) -> tuple[int, ...]:
    return (*weights.inside, *weights.outside)


@lru_cache(maxsize=64)
def _schedule(name: str, ranks: int, micros: int) -> Schedule:
    # What is under way grows no more once the pipeline is full.
    return Schedule.of(name, ranks, micros if name == "gpipe" else min(micros, 4 * ranks))
