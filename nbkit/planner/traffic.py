"""Computes the bytes that a rank sends in a step and holds at rest, from the formulas of the literature.

`per_step` gives the bytes sent, by axis and operation. Sizes follow nccl-tests (doc/PERFORMANCE.md). S is the whole
tensor of a collective: what an all-reduce reduces, what an all-gather ends with, what a reduce-scatter begins with.
Over n ranks, each must send 2(n-1)/n S in an all-reduce and (n-1)/n S in the other two, whatever the algorithm.

    axis  per step                                                                          source
    dp    zero=0: all-reduce of the gradients                                               Rajbhandari et al. 2020, 7.1
          zero=1, 2: reduce-scatter of the gradients, all-gather of the parameters          the same, 7.2.1
          of weights that a rank owns, all-to-alls of gradients and of weights in their place
          zero=3: all-gather of the parameters for forward and for backward, reduce-scatter the same, 7.2.2
          autocast: what only matrix products read, in its dtype; gradients unchanged       Micikevicius et al. 2018
          compress: all-to-all and all-gather of their bytes, rounded                     Seide et al. 2014
          sync_every: all-reduce of the parameters, a step's share of one                 Stich 2019
          hsdp: the same within a group, and an all-reduce of the shards across             Zhao et al. 2023, 3.2.2
          an all-reduce over nodes: reduce-scatter and all-gather within, all-reduce between    nbkit.mesh
    tp    a block: 4 all-reduces of its hidden states, two forward and two backward;        Shoeybi et al. 2019, 3
          with sequence parallelism, 4 all-gathers and 4 reduce-scatters in their place     Korthikanti et al. 2022, 4.2
          embedding and head: an all-reduce each; with it, an all-gather and a reduce-scatter
    ep    a layer of experts: all-to-alls of routed tokens and of outputs, forward and        Lepikhin et al. 2021, 3.1
          backward; the counts of tokens before them
    edp   the data axis of experts, over the dp / ep ranks that hold the same                 Rajbhandari et al. 2022
    pp    a boundary: the hidden states forward, their gradients backward;                  Narayanan et al. 2021, 3.2
          with tp, each rank its part of them                                               the same, 4.1
    cp    a block: all-gathers of keys and values in forward and again in backward,         Dubey et al. 2024, 3.3.2
          reduce-scatters of their gradients

A gradient that is a partial sum over tp or cp is all-reduced once, and so is the gradient of a weight tied over stages.
Gradients of weights outside of the blocks that are whole along tp are sent for every forward: all-reduced for a norm,
gathered for a table of positions. Left out: the few scalars of loss, norm and agreement, and the padding of uneven
parts. Buckets may split one call into many.

`Rest` has the bytes that a rank holds at rest: at the end of a step, with gradients, without activations. The table
gives them per trained element, over a sharding group of N ranks, with p bytes of parameter, g of gradient and o of
optimizer state (Adam in fp32: 4, 4, 8; mixed precision with fp32 master weights: 2, 2, 12), after ZeRO (Rajbhandari et
al. 2020, table 1 and section 5):

    zero=0   p + g + o        16
    zero=1   p + g + o/N      8 + 8/N
    zero=2   p + (g + o)/N    4 + 12/N
    zero=3   (p + g + o)/N    16/N

With a pipeline, a rank holds only its own stages. Tensor parallelism divides what it cuts (Shoeybi et al. 2019; norms
and some biases stay whole). Context parallelism changes nothing. A frozen element has only p. Left out: the step
counters of an optimizer (4 bytes per parameter tensor), and the padding of collectives, which is gone at rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nbkit.errors import StrategyError
from nbkit.mesh import BETWEEN, WITHIN, levels_of
from nbkit.planner.job_facts import Cuts, Facts, Weight, cuts_for, held, holders
from nbkit.planner.stages import ranks_of_stages
from nbkit.records.readings import sent_bytes
from nbkit.strategy import Strategy
from nbkit.techniques.tp_chunks import chunks_of, num_pieces
from nbkit.tensor_layout import bounds


@dataclass(frozen=True)
class Bytes:
    """Bytes per element of a parameter, of its gradient and of its optimizer state (including any master copy)."""

    parameter: int
    gradient: int
    optimizer: int


ADAM = Bytes(4, 4, 8)


@dataclass(frozen=True)
class Rest:
    """Bytes that one rank holds at rest. records.MemoryRecord counts the same."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


_FP32, _COUNT = 4, 8


@dataclass(frozen=True)
class TrafficTerm:
    """A term of a step: `calls` of `op` in groups of `ranks` ranks along `axis`. bytes: S, summed over all calls.

    level: WITHIN or BETWEEN nodes, if the term is part of an all-reduce in two levels. pieces: the calls
    of a sum that overlaps with its product. Half of the bytes belong to such sums. 1: no sum overlaps.
    """

    axis: str
    op: str
    ranks: int
    calls: int
    bytes: int
    what: str
    level: str = ""
    pieces: int = 1

    @property
    def wire(self) -> float:
        """Return the bytes that a rank sends, as they are counted when they are measured."""
        return sent_bytes(self.op, self.given, self.ranks)

    @property
    def given(self) -> float:
        """Return the bytes of the tensors that a rank hands to the operation. Telemetry counts these."""
        return self.bytes / self.ranks if self.op == "all_gather" else self.bytes


def per_step(
    weights: Sequence[Weight],
    facts: Facts,
    strategy: Strategy,
    rank: int,
    *,
    cuts: Cuts | None = None,
    each: Bytes = ADAM,
    hidden: int = _FP32,
    accumulation: int = 1,
    sequence_parallel: bool = True,
    node_of: Sequence[int] = (),
) -> tuple[TrafficTerm, ...]:
    """Return what `rank` sends in a step of `facts.batch` samples. Axes of degree 1 have no terms.

    cuts: the blocks that the ranks of a pipeline hold; None: equally many each. each: bytes per element of weights and
    gradients. hidden: bytes per element of hidden states. accumulation: forward passes in a step without a pipeline.
    node_of: the node number of each rank; () for one node.
    Raises StrategyError if a needed number of `facts` is unknown: batch, sequence and width for tp, pp and cp.
    """
    cuts = cuts_for(weights, strategy, cuts)
    step = _Step(weights, facts, strategy, rank, cuts, each, hidden, accumulation, sequence_parallel, node_of)
    terms = [*step.data(), *step.experts(), *step.tensor(), *step.pipeline(), *step.context()]
    return tuple(term for term in terms if term.bytes and term.ranks > 1)


def wire_bytes(terms: Sequence[TrafficTerm], axis: str | None = None) -> float:
    """Return the bytes that a rank sends in all of `terms`, or in those of one axis."""
    return sum(term.wire for term in terms if axis in (None, term.axis))


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the weights that a rank computes with, whole along dp, in bytes but for `elements`.

    elements: those that are trained. gradients, weights: of these. shard: of the gradients that the rank keeps under
    zero 1 to 3. gathered, gathered_again: what zero 3 gathers for a forward and for a backward.
    """

    elements: float
    gradients: int
    weights: int
    shard: int
    gathered: int
    gathered_again: int


def data_terms(
    strategy: Strategy, sizes: DataSizes, passes: int, rank: int, node_of: Sequence[int]
) -> Iterator[TrafficTerm]:
    """Yield what `rank` sends along the data axis, or along its halves in hsdp.

    passes: backward passes in a step. Zero 3 sends its bytes for each of them, but in a pipeline, which keeps what it
    has gathered while its micro-batches are under way.
    """
    s = strategy
    if s.zero == 0:
        for op, size, what in s.exchange.per_step(sizes.elements, sizes.gradients, sizes.weights):
            if op == "all_reduce":
                yield from summed(s, size, what, rank, node_of)
            else:
                yield TrafficTerm("dp", op, s.dp, 1, size, what)
        return
    axis, passes = "dp" if s.shard == s.dp else "shard", passes if s.zero == 3 and s.pp == 1 else 1
    yield TrafficTerm(axis, "reduce_scatter", s.shard, passes, passes * sizes.gradients, "gradients")
    if s.shard < s.dp:
        yield from summed(s, passes * sizes.shard, "gradients", rank, node_of, calls=passes)
    if s.zero < 3:
        yield TrafficTerm(axis, "all_gather", s.shard, 1, sizes.weights, "parameters")
        return
    yield TrafficTerm(axis, "all_gather", s.shard, passes, passes * sizes.gathered, "parameters, forward")
    if s.pp == 1:
        yield TrafficTerm(axis, "all_gather", s.shard, passes, passes * sizes.gathered_again, "parameters, backward")


def summed(
    strategy: Strategy, size: int, what: str, rank: int, node_of: Sequence[int], *, calls: int = 1
) -> Iterator[TrafficTerm]:
    """Yield an all-reduce of `size` bytes over `rank` and the ranks that hold the same, in one level or two."""
    axis, group = strategy.summed_axis, strategy.summed_group(rank)
    levels = levels_of(group, node_of)
    if levels is None:
        yield TrafficTerm(axis, "all_reduce", len(group), calls, size, what)
        return
    near, far = len(levels.within[0]), len(levels.between[0])
    yield TrafficTerm(axis, "reduce_scatter", near, calls, size, what, WITHIN)
    yield TrafficTerm(axis, "all_reduce", far, calls, -(-size // near), what, BETWEEN)
    yield TrafficTerm(axis, "all_gather", near, calls, size, what, WITHIN)


def block_pieces(strategy: Strategy, rows: int, tokens: int, *, sequence_parallel: bool = True) -> int:
    """Return the number of pieces in which a block sends its output for `rows` rows of `tokens` positions."""
    if sequence_parallel:
        return num_pieces(rows, -(-tokens // strategy.tp), chunks_of(strategy))
    return num_pieces(rows * tokens, 1, chunks_of(strategy))


def block_terms(
    tp: int,
    hidden: float,
    blocks: int,
    forwards: int,
    *,
    again: bool = False,
    sequence_parallel: bool = True,
    pieces: int = 1,
) -> Iterator[TrafficTerm]:
    """Yield what blocks send along tp. Each has two calls in forward and two in backward; `again`: one more.

    hidden: bytes of a block's hidden states, for all rows of a step. forwards: into which these rows are divided.
    pieces: of the output of each map whose inputs are split, see nbkit/techniques/tp_chunks.py.
    """
    size, what = round((4 + again) * blocks * hidden), "hidden states of the blocks"
    for op in ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",):
        calls = (4 + again + (pieces - 1) * (2 + (again and op != "all_gather"))) * blocks
        yield TrafficTerm("tp", op, tp, forwards * calls, size, what, pieces=pieces)


def routed_terms(strategy: Strategy, facts: Facts, rows: int, element: int, forwards: int) -> Iterator[TrafficTerm]:
    """Yield what a rank with `rows` samples sends to experts and gets back, in forward and backward.

    The tokens are taken as balanced: each rank of a group gets equally many. element: bytes of a feature.
    """
    layers = facts.routed
    # Forward and backward each send them to the experts and back. A recomputed forward does so once more.
    tokens = sum((2 + layer.again) * layer.slots * (layer.width + layer.given) for layer in layers)
    what, made = "tokens to experts and back", forwards * sum(1 + layer.again for layer in layers)
    calls = 2 * (made + forwards * len(layers))
    yield TrafficTerm("ep", "all_to_all", strategy.ep, calls, round(rows * element * tokens), what)
    numbers = sum((1 + layer.again) * (layer.count + strategy.ep) for layer in layers)
    yield TrafficTerm("ep", "all_to_all", strategy.ep, made, _COUNT * forwards * numbers, "counts of tokens")


def key_value_terms(
    strategy: Strategy, facts: Facts, whole: float, blocks: int, forwards: int, *, again: bool = False
) -> Iterator[TrafficTerm]:
    """Yield the keys and values that blocks send along cp.

    Forward gathers both in one call. Backward gathers them again, and sums their gradients in one call. `again`: a
    recomputed forward gathers them once more. whole: bytes of the hidden states of all positions.
    """
    heads, kv_heads = facts.heads or 1, facts.kv_heads or facts.heads or 1
    both = 2 * whole * kv_heads / heads / strategy.tp
    for op, times in (("all_gather", 2 + again), ("reduce_scatter", 1)):
        calls = times * blocks
        yield TrafficTerm("cp", op, strategy.cp, forwards * calls, round(both * calls), "keys and values")


@dataclass(frozen=True)
class _Step:
    weights: Sequence[Weight]
    facts: Facts
    strategy: Strategy
    rank: int
    cuts: Cuts | None
    each: Bytes
    hidden: int
    accumulation: int
    sequence_parallel: bool
    node_of: Sequence[int]

    def data(self) -> Iterator[TrafficTerm]:
        """Yield the terms of the data axis."""
        g, p = self.each.gradient, self.each.parameter
        trained, weights = [weight for weight in self._dense if weight.trained], self._dense
        if owned := [weight for weight in trained if weight.owner is not None]:
            yield from self._owned(owned)
            trained = [weight for weight in trained if weight.owner is None]
        held = self._held(trained)
        sizes = DataSizes(
            elements=held,
            gradients=g * held,
            weights=p * held,
            shard=g * self._held(trained, sharded=True),
            gathered=self._gathered(weights),
            # Weights outside the blocks are needed last in forward and first in backward, so they stay gathered.
            gathered_again=self._gathered([weight for weight in weights if not weight.outside]),
        )
        yield from data_terms(self.strategy, sizes, self.accumulation, self.rank, self.node_of)

    def _owned(self, weights: Sequence[Weight]) -> Iterator[TrafficTerm]:
        """Yield what goes to the owners of whole weights under zero 1 and 2, and what comes back from them."""
        s, axis = self.strategy, "dp" if self.strategy.shard == self.strategy.dp else "shard"
        own = self._held([weight for weight in weights if weight.owner == self._at["dp"] % s.shard])
        yield TrafficTerm(axis, "all_to_all", s.shard, 1, self.each.gradient * self._held(weights), "gradients")
        if s.shard < s.dp:
            yield from summed(s, self.each.gradient * own, "gradients", self.rank, self.node_of)
        yield TrafficTerm(axis, "all_to_all", s.shard, 1, self.each.parameter * own * s.shard, "parameters")

    @property
    def _dense(self) -> Sequence[Weight]:
        """Return the weights that are not those of spread experts."""
        return self.weights if self.strategy.ep == 1 else [w for w in self.weights if w.experts is None]

    def experts(self) -> Iterator[TrafficTerm]:
        """Yield what layers of experts exchange, and the data axis of their weights."""
        s = self.strategy
        if s.ep == 1:
            return
        size, copies = self._held([w for w in self.weights if w.experts is not None and w.trained]), s.dp // s.ep
        if s.zero == 0:
            yield TrafficTerm("edp", "all_reduce", copies, 1, self.each.gradient * size, "gradients of experts")
        else:
            yield TrafficTerm("edp", "reduce_scatter", copies, 1, self.each.gradient * size, "gradients of experts")
            yield TrafficTerm("edp", "all_gather", copies, 1, self.each.parameter * size, "experts")
        yield from routed_terms(s, self.facts, self._rows, self.hidden, self._forwards)

    def tensor(self) -> Iterator[TrafficTerm]:
        """Yield the terms of tp: blocks, vocabulary, and gradients that are partial sums."""
        n, m = self.strategy.tp, self._forwards
        if n == 1:
            return
        size = self._hidden_bytes(self._tokens)
        pair = ("all_gather", "reduce_scatter") if self.sequence_parallel else ("all_reduce",)
        pieces = block_pieces(self.strategy, self._rows // m, self._tokens, sequence_parallel=self.sequence_parallel)
        yield from block_terms(n, size, self._blocks, m, sequence_parallel=self.sequence_parallel, pieces=pieces)
        if self.facts.vocab is not None and self._has_first:
            for op in pair:
                yield TrafficTerm("tp", op, n, m, size, "embedding")
        if self.facts.vocab is not None and self._has_last:
            for op in pair:
                yield TrafficTerm("tp", op, n, m, size, "head")
            # One number per token each: the largest logit, the sum of exponentials and the target's logit.
            yield TrafficTerm("tp", "all_reduce", n, 3 * m, 3 * _FP32 * self._rows * self._sequence, "loss")
        if self.sequence_parallel:
            yield self._sum_of_parts("tp")
            if self.facts.vocab is not None:
                yield from self._outside()

    def _outside(self) -> Iterator[TrafficTerm]:
        """Yield the gradients of weights that are whole along tp and used before the first block or after the last."""
        n, m, width = self.strategy.tp, self._forwards, _known(self.facts.width, "width")
        for weight in self.weights:
            if weight.outside and weight.trained and weight.tp_dim is None and self._held([weight]):
                if weight.shape == (width,):
                    yield TrafficTerm(
                        "tp", "all_reduce", n, m, m * self.each.gradient * width, f"gradient of {weight.name}"
                    )
                elif len(weight.shape) == 2 and weight.shape[1] == width:
                    size = self.each.gradient * min(weight.shape[0], self._sequence) * width
                    yield TrafficTerm("tp", "all_gather", n, m, m * size, f"gradient of {weight.name}")

    def pipeline(self) -> Iterator[TrafficTerm]:
        """Yield the terms of pp: boundaries with other ranks, and tied weights."""
        if self.cuts is None:
            return
        at, m, stages = self._at["pp"], self._forwards, ranks_of_stages(self.strategy)
        tokens = _part(self._tokens, self.strategy.tp, self._at["tp"]) if self.sequence_parallel else self._tokens
        edges, size = list(pairwise(stages)), self._hidden_bytes(tokens)
        forward, backward = sum(a == at != b for a, b in edges), sum(b == at != a for a, b in edges)
        yield TrafficTerm("pp", "send", 2, m * forward, size * forward, "hidden states")
        yield TrafficTerm("pp", "send", 2, m * backward, size * backward, "gradients of hidden states")
        for weight in self.weights:
            sharing = holders(weight, self.cuts)
            if weight.trained and at in sharing:
                size = self.each.gradient * (self._held([weight], sharded=self.strategy.zero > 0) + 1)
                yield TrafficTerm("pp", "all_reduce", len(sharing), 1, size, f"gradient of {weight.name}, tied")

    def context(self) -> Iterator[TrafficTerm]:
        """Yield the terms of cp: keys and values, ends of the split region, and gradients that are partial sums."""
        n, m = self.strategy.cp, self._forwards
        if n == 1:
            return
        whole = self._hidden_bytes(self._sequence)
        yield from key_value_terms(self.strategy, self.facts, whole, self._blocks, m)
        if self._has_first:
            yield TrafficTerm("cp", "all_gather", n, m, whole, "gradients of the first block's input")
        if self._has_last:
            yield TrafficTerm("cp", "all_gather", n, m, whole, "the last block's output")
        yield self._sum_of_parts("cp")

    def _sum_of_parts(self, axis: str) -> TrafficTerm:
        parts = [weight for weight in self.weights if weight.trained and axis in weight.summed]
        sizes = [self._held([weight], sharded=self.strategy.zero > 0) for weight in parts]
        # Each gradient is sent with a number that says whether this rank has one.
        size = self.each.gradient * sum(size + 1 for size in sizes if size)
        return TrafficTerm(
            axis, "all_reduce", self.strategy.mesh.degree(axis), 1, size, "gradients that are partial sums"
        )

    def _held(self, weights: Sequence[Weight], *, sharded: bool = False) -> int:
        return sum(held(weight, self.strategy, self.rank, self.cuts, sharded=sharded) for weight in weights)

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of `weights` as zero 3 gathers them."""
        return sum((weight.gathered or self.each.parameter) * self._held([weight]) for weight in weights)

    def _hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of hidden states at `tokens` positions, for all rows that this rank sees in a step."""
        return self._rows * tokens * _known(self.facts.width, "width") * self.hidden

    @property
    def _at(self) -> dict[str, int]:
        return self.strategy.mesh.index(self.rank)

    @property
    def _rows(self) -> int:
        return _part(_known(self.facts.batch, "batch"), self.strategy.dp, self._at["dp"])

    @property
    def _sequence(self) -> int:
        return _known(self.facts.sequence, "sequence")

    @property
    def _tokens(self) -> int:
        """Return the number of positions that this rank has between the first block and the last."""
        return _part(self._sequence, self.strategy.cp, self._at["cp"])

    @property
    def _forwards(self) -> int:
        return self.strategy.microbatches or self.accumulation

    @property
    def _blocks(self) -> int:
        """Return the number of blocks that this rank runs."""
        if self.cuts is None:
            return _known(self.facts.blocks, "blocks")
        return sum(stop - start for start, stop in self.cuts[self._at["pp"]])

    @property
    def _has_first(self) -> bool:
        return self.cuts is None or ranks_of_stages(self.strategy)[0] == self._at["pp"]

    @property
    def _has_last(self) -> bool:
        return self.cuts is None or ranks_of_stages(self.strategy)[-1] == self._at["pp"]


def _part(total: int, parts: int, index: int) -> int:
    start, stop = bounds(total, parts, index)
    return stop - start


def _known(value: int | None, name: str) -> int:
    if value is None:
        raise StrategyError(
            "The traffic of this strategy depends on numbers that are not known.",
            numbers=f"{name} is unknown",
            hint=f"Facts({name}=...)",
        )
    return value
