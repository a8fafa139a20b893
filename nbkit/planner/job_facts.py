"""Holds the planner's facts about a model and a job: plain numbers, each of which may be unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nbkit.planner.stages import place
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout, bounds


@dataclass(frozen=True)
class Facts:
    """Numbers of a model, a batch and a machine. None means unknown; nothing is concluded from it.

    heads, kv_heads, width, vocab: of a transformer. blocks: number of units that a pipeline can divide, in order.
    costs: of each block, in any unit. sequence: tokens of a sample. batch: samples of a global batch. world: number of
    ranks. node: ranks of one node. routed: the layers of experts.
    """

    heads: int | None = None
    kv_heads: int | None = None
    width: int | None = None
    vocab: int | None = None
    blocks: int | None = None
    costs: tuple[float, ...] | None = None
    sequence: int | None = None
    batch: int | None = None
    world: int | None = None
    node: int | None = None
    routed: tuple[Routed, ...] = ()


@dataclass(frozen=True)
class Routed:
    """A layer of experts.

    slots: the rows that it sends to experts, for each sample. width: features of such a row. given: features of what an
    expert makes of it. count: the number of experts. again: its forward is computed again in the backward pass.
    """

    slots: float
    width: int
    given: int
    count: int
    again: bool = False


@dataclass(frozen=True)
class Weight:
    """A parameter of the model as one process has it. A tied parameter is one weight.

    shape: global. tp_dim: the dim that tensor parallelism cuts; None if every tp rank holds all of it. blocks: the
    blocks that it goes with in a pipeline: its own block; the first one for an embedding, the last one for a head, both
    if the two are tied; empty if every stage holds it. outside: True if it is not part of a block itself. trained: True
    if it has a gradient. summed: axes (tp, cp) over whose ranks its gradient is a sum, because each rank has seen a
    part of the sequence. gathered: bytes of an element as zero 3 gathers it, if it is cast before; None: those of the
    parameter. experts: (first, how many, of how many) experts of a layer that it belongs to; several are stacked along
    dim 0. None for other weights. owner: under zero 1 and 2, the place in the sharding group of the rank that updates
    all of it; None if each rank updates a part.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[int, ...] = ()
    outside: bool = False
    trained: bool = True
    summed: tuple[str, ...] = ()
    gathered: int | None = None
    experts: tuple[int, int, int] | None = None
    owner: int | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole weight."""
        return prod(self.shape)


Cuts = Sequence[Sequence[tuple[int, int]]]
"""The ranges of blocks that each rank along pp holds, as `place` returns them."""


def held(weight: Weight, strategy: Strategy, rank: int, cuts: Cuts | None, *, sharded: bool = False) -> int:
    """Return the number of elements of `weight` that `rank` holds. cuts: None if there is no pipeline.

    sharded: count only its shard in the sharding group along dp. Shards cut dim 0 in balanced parts; scalars stay
    whole. Experts are spread over ep ranks, and sharded over the ranks that hold the same.
    """
    at = strategy.mesh.index(rank)
    if cuts is not None and weight.blocks and at["pp"] not in holders(weight, cuts):
        return 0
    layout = Layout.whole(weight.shape)
    if weight.tp_dim is not None:
        layout = layout.part(weight.tp_dim, strategy.tp, at["tp"])
    shards, index = strategy.shard, at["dp"] % strategy.shard
    if strategy.ep > 1 and weight.experts is not None:
        first, many, every = weight.experts
        start, stop = bounds(every, strategy.ep, at["dp"] % strategy.ep)
        start, stop = max(start - first, 0), min(stop - first, many)
        if start >= stop:
            return 0
        layout = layout.cut(0, start, stop) if many > 1 else layout
        shards, index = strategy.dp // strategy.ep, at["dp"] // strategy.ep
    if sharded and weight.shape:
        layout = layout.part(0, shards, index)
    return layout.numel


def holders(weight: Weight, cuts: Cuts) -> list[int]:
    """Return the ranks along pp that hold `weight`. There are several if it is tied."""
    return [
        rank
        for rank, ranges in enumerate(cuts)
        if not weight.blocks or any(start <= block < stop for start, stop in ranges for block in weight.blocks)
    ]


def cuts_for(weights: Sequence[Weight], strategy: Strategy, cuts: Cuts | None) -> Cuts | None:
    """Return `cuts`, or equal numbers of blocks per stage if `cuts` is None; None without a pipeline."""
    if strategy.pp == 1 or cuts is not None:
        return cuts
    return place([1.0] * (1 + max((block for weight in weights for block in weight.blocks), default=0)), strategy)
