"""Predicts the bytes that a rank holds at the peak of a step, including activations.

The panel, the plan and a switch all use this sum. It begins with the bytes at rest (nbkit/planner/traffic.py). At each
moment of a step, it adds the bytes that the pieces of the model keep and use (`PeakLines`), and the temporary bytes of
the data axis and of a pipeline:

    zero 0      new gradients, until their bucket is complete and they move into its buffer
    two levels  copies of up to three buckets, which are summed within the node and between nodes (nbkit/mesh.py);
                over gloo, also the receive buffer of the newest bucket
    zero 1, 2   copies of up to two buckets that are being reduced, and over gloo their receive buffers; after the
                update, the parameters that are gathered for two buckets
    int8        the rounding errors of the gradients, kept for the next step (nbkit/techniques/compress.py)
    sync_every  the weights of the last average and their momentum; only Adam and similar optimizers have them, but
                they are counted for every optimizer
    zero 3      the whole parameters of the unit that computes, and of the next unit, which is being gathered; the
                gradients of up to two units that are being reduced; the root (the parameters outside of blocks)
    a pipeline  gradients of a whole stage beside the buffers; for each micro-batch under way, the activations of its
                stages; hidden states that are received for the next operations; between an I and its W (see
                nbkit/schedules), also the gradients of each layer's output. With zero 3, all units of the rank stay
                gathered

Left out are the batch itself, the memory of kernels and communication libraries, and the gaps of the allocator.

A piece is the least that a pipeline can place on a rank: a block, plus the layers before the first block or after the
last one. At every moment, the bytes of its forward and its backward are linear in the number of rows. So two runs give
them for any number of rows. nbkit/rank/train/estimate/model_trace.py measures pieces like this.

`GPTPieces` computes the pieces of nbkit's GPT by formula, for plans on hardware that is not there. The results equal
the measurements of model_trace. Let T be the positions, D the width, t the tensor ranks and c the context ranks. For
backward, a block keeps this number of elements per row:

    whole                 inputs of the linear layers after both norms             2 T D / c
    over t                queries, keys, values, attention                         4 T D / (t c)
                          the inner layer, before and after its activation         8 T D / (t c)
    over t if c = 1       residual sums (2)                                        2 T D / (t c), or 2 T D / c
    statistics (fp32)     of norms and attention                                   4 T / (t c), T heads / (t c)

This is the count of Korthikanti et al. 2022 (section 4), without dropout masks and with an attention that does not keep
its scores.

With c > 1, keys and values of all positions exist only while attention computes, in forward and in backward. Embedding,
head and loss see all positions on every rank. So a rank has c times the logits of a rank of data parallelism that
computes equally many positions in its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.job_facts import Facts
from nbkit.planner.stages import ranks_of_stages
from nbkit.planner.traffic import Bytes, Rest
from nbkit.schedules import Schedule, type_of
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class PeakLine:
    """A number of bytes that is linear in the number of rows: `fixed`, plus `row` for each row."""

    fixed: float = 0.0
    row: float = 0.0

    def at(self, rows: float) -> float:
        """Return the bytes for this number of rows."""
        return self.fixed + self.row * rows

    def __sub__(self, other: PeakLine) -> PeakLine:
        return PeakLine(self.fixed - other.fixed, self.row - other.row)

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> PeakLine:
        """Return the line through two points (rows, bytes)."""
        row = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - row * first[0], row)


PeakLines = tuple[PeakLine, ...]
"""A line for each of several moments. The peak is the highest of them."""


def most(peak: PeakLines, rows: float) -> float:
    """Return the bytes at the highest moment."""
    return max((line.at(rows) for line in peak), default=0.0)


def upper(lines: Iterable[PeakLine]) -> PeakLines:
    """Return the lines of `lines` that are the highest for some number of rows >= 0."""
    found: list[PeakLine] = []
    for line in sorted(set(lines), key=lambda line: (line.row, line.fixed)):
        while found and found[-1].fixed <= line.fixed:
            found.pop()
        # The middle one of three lines is never the highest if the outer two cross above it.
        while len(found) > 1 and _cross(found[-2], line) <= _cross(found[-2], found[-1]):
            found.pop()
        found.append(line)
    return tuple(found)


def _cross(low: PeakLine, high: PeakLine) -> float:
    """Return the number of rows above which `high` is higher than `low`."""
    return (low.fixed - high.fixed) / (high.row - low.row)


@dataclass(frozen=True)
class ModelPiece:
    """Bytes of one piece, in addition to those that were allocated when its forward began. Its parameters are whole.

    forward, backward: bytes at their highest moments. backward includes `kept` and the gradients that it makes. kept:
    held from the end of its forward to its backward, including its output. carried: its output only. deferred: the
    gradients of each layer's output, which a split backward keeps until it computes the gradients of the weights.
    """

    forward: PeakLines
    kept: PeakLine
    backward: PeakLines
    carried: PeakLine
    deferred: PeakLine = PeakLine()


@dataclass(frozen=True)
class Updating:
    """Temporary bytes of an optimizer's step, per byte of the largest parameter and per byte of all parameters."""

    largest: float = 2.0
    all: float = 0.0


_POSTED = 2


@dataclass(frozen=True)
class Weights:
    """Bytes of each parameter of a piece on a rank, in the order of use, whole along the data axis.

    inside: of the piece's block. outside: of the layers before the first block or after the last one, trained or not.
    partial: bytes of the parameters whose gradients are sums over tp or cp. less_inside, less_outside: bytes that zero
    3 saves when it gathers, since some parameters are cast first.
    """

    inside: tuple[int, ...]
    outside: tuple[int, ...] = ()
    partial: int = 0
    less_inside: int = 0
    less_outside: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all parameters of the piece."""
        return sum(self.inside) + sum(self.outside)

    @property
    def gathered(self) -> int:
        """Return the bytes that zero 3 gathers for all parameters of the piece."""
        return self.total - self.less_inside - self.less_outside

    @property
    def gathered_inside(self) -> int:
        """Return the bytes that zero 3 gathers for the piece's block."""
        return sum(self.inside) - self.less_inside


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at its highest moment, by purpose.

    activations: the tensors that forward keeps for backward. working: all other temporary bytes: of compute and update,
    of gradients that are being reduced, and of gathered parameters. moment: "forward", "backward", "sum", "update" or
    "gather".
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    moment: str

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


@dataclass(frozen=True)
class _Moment:
    """Bytes at one moment of a step.

    gradients: bytes of the gradients so far, with one data rank. Several data ranks have permanent gradient buffers.
    """

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
    pieces: Sequence[ModelPiece],
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
    """Return the peak of the rank at `place` along pp.

    pieces: the pieces as this strategy's tensor and context axes cut them. weights: one for each piece. ranges: the
    pieces that the rank holds, one range for each of its stages; all pieces without a pipeline. rest: its bytes at
    rest. rows: rows of the largest micro-batch. micros: forwards in a step. buffers: bytes of the module's buffers.
    received: True if a reduce-scatter has its own receive buffer, as over gloo. levels: ranks of a node over which
    gradients are summed before they are summed between nodes; 1 if they are summed in one level.
    """
    step = _Step(strategy, place, pieces, weights, ranges, rest, rows, micros, updating or Updating(), received, levels)
    highest = max(step.moments(), key=lambda moment: moment.total)
    return Peak(
        rest.parameters + buffers,
        rest.gradients if strategy.dp > 1 else round(highest.gradients),
        rest.optimizer,
        round(highest.kept),
        round(highest.working + rest.gradients * strategy.exchange.kept),
        highest.name,
    )


@dataclass(frozen=True)
class _Step:
    strategy: Strategy
    place: int
    pieces: Sequence[ModelPiece]
    weights: Sequence[Weights]
    ranges: Sequence[tuple[int, int]]
    rest: Rest
    rows: float
    micros: int
    updating: Updating
    received: bool
    levels: int

    def moments(self) -> Iterator[_Moment]:
        """Yield the moments of a step.

        Their bytes come on top of parameters, optimizer state and, with several data ranks, the buffers of gradients.
        """
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
        """Return the bytes of the gradients of all parameters that this rank computes with, whole along dp."""
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
            sizes = sorted((sum(bucket) for bucket in self.strategy.exchange.buckets(own[::-1])), reverse=True)[:2]
            yield _Moment("gather", 0.0, sum(sizes) * (1 + 1 / self.strategy.shard))

    def _passes(self) -> Iterator[_Moment]:
        """Yield the moments of forward and backward without a pipeline."""
        rows, count, alone = self.rows, len(self.pieces), self.strategy.dp == 1
        kept = [0.0, *accumulate(piece.kept.at(rows) for piece in self.pieces)]
        # With several micro-batches, the gradients of the earlier ones already exist.
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
                        # Gradients are copied and released before any are received, so the two do not add up.
                        yield _Moment("backward", kept[i], fresh + max(bucket, reduced - bucket) + under_way[1])
                        under_way = [under_way[1], reduced]
                    fresh -= bucket
        if self.strategy.zero == 3:
            yield _Moment("backward", 0.0, fresh + self._reduced(fresh) + self._root + under_way[1])

    def _reduced(self, size: float) -> float:
        """Return the bytes of a copy of gradients of `size` bytes, and of the buffer that receives in a reduce-scatter.

        Each of two ranks receives only the half that it keeps (nbkit/rank/comm/gloo/collectives.py).
        """
        ranks = self.levels if self._in_levels else self.strategy.shard
        return size * (1 + self.received * (0.5 if ranks == 2 else 1))

    @property
    def _in_levels(self) -> bool:
        """Return True if all gradients are all-reduced, in two levels."""
        return self.levels > 1 and not self.strategy.zero and self.strategy.exchange.is_sum

    def _summed(self, newest: float, others: Sequence[float]) -> float:
        """Return the bytes held while buckets are summed in two levels. others: up to two buckets before the newest."""
        made = [newest] * (self.received and self.levels > 2) + [*others[:1]]  # the sum of the oldest is being gathered
        return self._reduced(newest) + sum(others) + sum(made) / self.levels

    @property
    def _root(self) -> float:
        return float(sum(sum(self.weights[i].outside) - self.weights[i].less_outside for i in self._own))

    def _gathered(self, i: int, *, backward: bool = False) -> float:
        """Return the bytes of gathered parameters while piece i computes and the next piece is being gathered."""
        if self.strategy.zero < 3:
            return 0.0
        beside = i - 1 if backward else i + 1
        arriving = self.weights[beside].gathered_inside if 0 <= beside < len(self.weights) else 0
        return self._root + self.weights[i].gathered_inside + arriving

    def _complete(self, i: int) -> list[float]:
        """Return the bytes of each bucket that the backward of piece i completes."""
        order = [(size, j) for j in reversed(range(len(self.weights))) for size in _all(self.weights[j])[::-1]]
        found, at = [], 0
        for bucket in self.strategy.exchange.buckets([size for size, _ in order]):
            at += len(bucket)
            if order[at - 1][1] == i:
                found.append(float(sum(bucket)))
        return found

    def _pipeline(self) -> Iterator[_Moment]:
        """Yield the moments of this rank's operations in a pipeline, including the activations that its stages keep."""
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
            cut = sorted((sum(bucket) for bucket in self.strategy.exchange.buckets(every[::-1])), reverse=True)
            yield _Moment("backward", 0.0, self._summed(cut[0], cut[1:3]))
        elif self.strategy.zero in (1, 2):
            every = [size for i in self._own for size in _all(self.weights[i])]
            sizes = sorted((sum(bucket) for bucket in self.strategy.exchange.buckets(every[::-1])), reverse=True)[:2]
            yield _Moment("backward", 0.0, (total if self.strategy.zero == 2 else 0.0) + self._reduced(sum(sizes)))
        elif self.strategy.zero == 3:
            largest = max(sum(self.weights[i].inside) for i in self._own)
            yield _Moment("backward", 0.0, total + gathered + self._reduced(largest))

    def _arriving(self, homes: Sequence[int], stages: Mapping[int, _Stage]) -> dict[tuple[str, int], float]:
        """Return {(kind, stage) of an operation: bytes that it receives from another rank}."""
        found = {}
        for number, stage in stages.items():
            if number and homes[number - 1] != self.place:
                found["F", number] = stage.received
            if number + 1 < len(homes) and homes[number + 1] != self.place:
                found["B", number] = found["I", number] = stage.handed
        return found


@dataclass(frozen=True)
class _Stage:
    """Bytes of a stage of a pipeline.

    forward, backward: bytes at their highest moments, in addition to those before the forward. again: backward, if it
    adds to gradients that exist. received, handed: bytes that come from the previous stage, and from the next one.
    deferred: bytes held between an I and its W. weights: bytes of the largest gradient that a W makes.
    """

    forward: float
    kept: float
    backward: float
    again: float
    received: float
    handed: float
    deferred: float
    weights: float


def _stage(pieces: Sequence[ModelPiece], weights: Sequence[Weights], lo: int, hi: int, rows: float) -> _Stage:
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
    # Once the pipeline is full, more micro-batches need no more memory.
    return Schedule.of(name, ranks, micros if type_of(name).holds_all else min(micros, 4 * ranks))


_FP32 = 4


@dataclass(frozen=True)
class GPTPieces:
    """The pieces of a GPT by formula.

    element: bytes of an element of an activation (2 in bf16). parameter: bytes of an element of a weight. recompute: as
    in nbkit.Compute.
    """

    config: GPTConfig
    element: int = 4
    parameter: int = 4
    recompute: bool | str = False

    def pieces(self, tp: int, cp: int) -> tuple[ModelPiece, ...]:
        """Return one piece for each block, on a rank with these degrees."""
        of, element = self.config, self.element
        hidden, numbers = of.block * of.width * element, of.block * of.vocab
        part = hidden / (tp * cp)
        state = hidden / cp if cp > 1 else part  # between blocks; under cp, ranks along tp do not divide it
        statistics = _FP32 * of.block * (4 + of.heads) / (tp * cp)
        kept = 2 * hidden / cp + 12 * part + 2 * state + statistics
        # Under tp without cp, the inputs and outputs of the outer linear layers are whole for a moment.
        wide, square = 4 * part + (hidden if tp > 1 and cp == 1 else 0), self.parameter * of.width**2 / tp
        top = kept + (2 * hidden / cp if tp > 1 else part)
        if cp > 1:
            # Keys and values of all positions arrive, and are brought into the order of positions.
            top = max(top, hidden / cp + 5 * part + 4 * hidden / tp)
        # Three moments: after the activation and the inner linear layer, in the linear layers of attention, and at the
        # end with all gradients.
        backward: tuple[PeakLine, ...] = (
            PeakLine(4 * square, kept + wide),
            PeakLine(8 * square, kept - 3 * hidden / cp),
            PeakLine(12 * square, 5 * hidden / cp),
        )
        if cp > 1:
            # Attention has gathered all keys and values again, and computes their gradients.
            backward = (*backward, PeakLine(9 * square, 6 * part + 2 * hidden / cp + 5.5 * hidden / tp))
        if self.recompute == "selective":
            # The input; queries, keys and values; the outputs of attention and of the layers behind it and before the
            # activation; under tp and cp also what was gathered, since no collective runs twice. Where a forward ends,
            # the input and the output of the last layer are there, too. Under tp with cp, the output is there before
            # and after it is summed.
            gathered = 2 * hidden if tp > 1 and cp == 1 else 0  # under cp, ranks along tp do not divide positions
            sums = _FP32 * of.block * of.heads / (tp * cp)
            keys = 2 * hidden * (1 - 1 / cp) / tp
            held = 8 * part + 2 * state + 3 * (cp > 1) * part + keys + gathered + sums
            end = held + 4 * part + (3 if tp > 1 and cp > 1 else 1) * state + gathered
            block = ModelPiece((PeakLine(0, end),), PeakLine(0, held), backward, PeakLine(0, state))
        elif self.recompute:
            again = tuple(PeakLine(line.fixed, line.row + state) for line in backward)
            block = ModelPiece((PeakLine(0, top),), PeakLine(0, state), again, PeakLine(0, state))
        else:
            block = ModelPiece((PeakLine(0, top),), PeakLine(0, kept), backward, PeakLine(0, state))
        logits = numbers / tp
        ends = hidden if cp > 1 else 0
        # The first block gets the states of all positions. If it is recomputed, it keeps them.
        begin = hidden if self.recompute and cp > 1 else state
        first = ModelPiece(
            (PeakLine(block.forward[0].fixed, block.forward[0].row + state + ends),),
            PeakLine(0, block.kept.row + begin),
            tuple(PeakLine(line.fixed, line.row + begin) for line in block.backward),
            block.carried,
        )
        joined = hidden - state if cp > 1 else 0
        behind = block.kept.row + hidden + joined + _FP32 * logits + 2 * _FP32 * of.block
        last = ModelPiece(
            (PeakLine(0, max(block.forward[0].row, behind + element * logits)),),
            PeakLine(0, behind),
            (
                PeakLine(0, behind + 2 * _FP32 * logits),
                *_after(block.backward, self.parameter * of.vocab * of.width / tp),
            ),
            PeakLine(0, 0),
        )
        if of.layers == 1:
            return (ModelPiece((*first.forward, *last.forward), last.kept, last.backward, last.carried),)
        return (first, *(block,) * (of.layers - 2), last)

    def weights(self, tp: int, cp: int) -> list[Weights]:
        """Return the bytes of the parameters of each piece, on a rank with these degrees."""
        of, size = self.config, self.parameter
        square = size * of.width**2 // tp
        vectors = (size * of.width,) * 6 + (size * 3 * of.width // tp, size * 4 * of.width // tp)
        inside = (square,) * 4 + (4 * square,) * 2 + vectors
        partial = sum(inside) if cp > 1 else 6 * size * of.width if tp > 1 else 0
        # Zero 3 casts weights that only linear layers read before it gathers them, but not norms and embedding tables.
        cast = max(size - self.element, 0) if tp == 1 else 0
        less, head = cast * (12 * of.width**2 + 9 * of.width), cast * of.vocab * of.width
        block = Weights(inside, (), partial, less)
        table, places = size * of.vocab * of.width // tp, size * of.block * of.width
        ends = (table, places), (2 * size * of.width, table)
        if of.layers == 1:
            return [Weights(inside, (*ends[0], *ends[1]), partial, less, head)]
        first, last = Weights(inside, ends[0], partial, less), Weights(inside, ends[1], partial, less, head)
        return [first, *(block,) * (of.layers - 2), last]

    @property
    def name(self) -> str:
        """Return a description for people."""
        return f"a GPT of {self.parameters() / 1e9:.3g} B parameters"

    @property
    def each(self) -> Bytes:
        """Return bytes per element. Weights and gradients are in fp32, also if nbkit trains in bf16."""
        return Bytes(self.parameter, self.parameter, 2 * self.parameter)

    def recomputing(self, recompute: bool | str) -> GPTPieces:
        """Return the same pieces with this value of `recompute`."""
        return replace(self, recompute=recompute)

    def touched(self, tp: int = 1, cp: int = 1) -> float:
        """Return the bytes per row that a forward reads and writes outside of matrix products.

        They are those of norms, sums, the activation and logits.
        """
        of = self.config
        return self.element * of.block * (of.layers * 28 * of.width + 4 * of.vocab) / (tp * cp)

    def facts(self, batch: int) -> Facts:
        """Return the facts that a strategy is checked against."""
        of = self.config
        return Facts(
            heads=of.heads,
            kv_heads=of.heads,
            width=of.width,
            vocab=of.vocab,
            blocks=of.layers,
            sequence=of.block,
            batch=batch,
        )

    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        of = self.config
        return of.layers * (12 * of.width**2 + 13 * of.width) + (2 * of.vocab + of.block + 2) * of.width

    def flops(self, tp: int = 1, cp: int = 1) -> float:
        """Return the flops of one row's forward, in linear layers and in attention: two for each multiplication.

        Half of attention is masked. With cp > 1, each cp rank computes the whole head.
        """
        of = self.config
        attention = of.layers * of.block * of.width
        return 2.0 * of.block * ((of.layers * 12 * of.width**2 + attention) / cp + of.vocab * of.width) / tp

    def costs(self) -> tuple[float, ...]:
        """Return the number of multiplications of each piece, per position. The head belongs to the last piece."""
        of = self.config
        block = 12.0 * of.width**2 + of.block * of.width
        return (block,) * (of.layers - 1) + (block + of.vocab * of.width,)

    def refused(self, strategy: Strategy) -> None:
        """Return None: a GPT refuses no strategy that its numbers allow."""


def _after(lines: tuple[PeakLine, ...], more: float) -> tuple[PeakLine, ...]:
    return tuple(PeakLine(line.fixed + more, line.row) for line in lines)


# The peak of a switch. Normally, a rank holds the old model, the new model and the buffers of the exchange at the same
# time. In place, it moves one tensor after the other and releases each old one. Then it holds at most the larger of the
# two models plus SPARE_BYTES.

SPARE_BYTES = 64 << 20
"""Bytes in addition to the larger model: the buffers of a round, and the old and new tensors that move in it."""


class During(NamedTuple):
    """Memory of a switch. num_bytes: bytes of each rank at the peak. in_place: True if all ranks switch in place."""

    num_bytes: tuple[int, ...]
    in_place: bool


def during(old: Sequence[int], new: Sequence[int], *, buffers: int, left: Sequence[int | None]) -> During:
    """Return the memory of each rank at the peak of a switch.

    old, new: bytes of each rank's model (weights, optimizer state, and the gradients that it keeps between steps).
    buffers: bytes of the exchange, see Exchange.buffer_bytes. left: bytes that each rank can still allocate while it
    holds the old model; None if unknown. If one rank has no room for both models, all ranks switch in place.
    """
    both_fit = all(fits(after, buffers=buffers, left=free) for after, free in zip(new, left, strict=True))
    pairs = zip(old, new, strict=True)
    if both_fit:
        return During(tuple(before + after + buffers for before, after in pairs), in_place=False)
    return During(tuple(max(before, after) + SPARE_BYTES for before, after in pairs), in_place=True)


def fits(new: int, *, buffers: int, left: int | None) -> bool:
    """Return True if a rank that can still allocate `left` bytes has room for a second model of `new` bytes."""
    return left is None or new + buffers <= left
