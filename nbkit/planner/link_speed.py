"""Holds the measured speed of the links between the ranks of a cluster, and predicts what operations take on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from nbkit.node_levels import WITHIN, levels_of
from nbkit.planner.stages import ranks_of_stages
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy


def ranks_of_node(node_of: Sequence[int]) -> int | None:
    """The most ranks that are neighbours on one node, counted from rank 0; None on one node. node_of: see WorldLinks.

    Where nodes have unequal numbers, what divides each of them.
    """
    sizes = Counter(node_of).values()
    return gcd(*sizes) if len(sizes) > 1 else None


@dataclass(frozen=True)
class OperationSpeed:
    """latency: seconds of an operation of hardly any bytes. speed: bytes that a rank sends per second, all at once.

    gap: seconds after which the next operation may follow, which is less where several can be under way (the g of
    LogGP; Alexandrov et al. 1995); None: the latency.
    """

    latency: float
    speed: float
    gap: float | None = None

    def holds(self, num_bytes: float) -> float:
        """Seconds in which an operation that sends so much keeps the next one waiting."""
        return (self.latency if self.gap is None else self.gap) + num_bytes / self.speed

    def seconds(self, calls: float, num_bytes: float) -> float:
        """Of `calls` operations that send `num_bytes` together."""
        return calls * self.latency + num_bytes / self.speed


@dataclass(frozen=True)
class WorldLinks:
    """The links of a world of `ranks`. ways: by operation (all_to_all, all_reduce, all_gather, reduce_scatter, send).

    near, far: an all-to-all within the nodes alone, and a message of every rank to the one in its place on the next
    node; None on one node. copy: bytes per second that every rank copies at once, into memory that it has just got.
    node_of: of each rank, the number of its node. crowded: some ranks share what they compute and send with, so that
    none is as fast as it would be alone.
    """

    ranks: int
    ways: Mapping[str, OperationSpeed]
    near: OperationSpeed | None
    far: OperationSpeed | None
    copy: float
    node_of: tuple[int, ...]
    crowded: bool

    def moving(self, sent: Sequence[int], received: Sequence[int], kept: Sequence[int]) -> float:
        """Return seconds of one exchange: the rank that sends or receives most, and the one that copies most of its
        own."""
        most = max((*sent, *received), default=0)
        # What is sent is packed, and what arrives is unpacked: two copies beside the way.
        carried = self.ways["all_to_all"].seconds(1, most) + 2 * most / self.copy if most else 0.0
        return carried + max(kept, default=0) / self.copy

    def way(self, term: TrafficTerm, *, spans_nodes: bool = False, apart: bool = False) -> OperationSpeed:
        """Of an operation of `term`. spans_nodes: its group has ranks of several nodes; apart: and one on each."""
        way, one = self.ways.get(term.op, self.ways["all_to_all"]), self.ways["send"]
        latency, gap, speed = way.latency, way.gap, way.speed
        if term.op != "send" and one.latency < latency and self.ranks > 2:
            # In a ring it grows with the ranks, through a switch it does not: between one message and all ranks' own.
            share = (term.ranks - 2) / (self.ranks - 2)
            latency = one.latency + share * (latency - one.latency)
            gap = None if gap is None else min(gap, latency)
        if self.far is not None and self.near is not None:
            if not spans_nodes:
                # All that was measured over the ranks of several nodes went between nodes too, but this.
                closer = min(self.near.latency / self.far.latency, 1.0) if self.far.latency else 1.0
                return OperationSpeed(closer * latency, self.near.speed, None if gap is None else closer * gap)
            # In a ring over all ranks one of each node sends to others; here all do, as when `far` was measured.
            speed = min(speed, self.far.speed) if apart else speed
        return OperationSpeed(latency, speed, gap)

    def __str__(self) -> str:
        way = self.ways["all_to_all"]
        text = f"{way.speed / 1e9:.3g} GB/s and {_delay(way)} between {self.ranks} ranks"
        if self.near is None or self.far is None:
            return text
        return (
            f"{self.near.speed / 1e9:.3g} GB/s within a node, {self.far.speed / 1e9:.3g} GB/s between nodes, "
            f"{_delay(way)}"
        )


def between_nodes(terms: Sequence[TrafficTerm], strategy: Strategy, rank: int, node_of: Sequence[int]) -> float:
    """Bytes of `terms` that `rank` sends to other nodes, collectives as rings of their ranks in order."""
    return sum(term.wire * _leaving(term, strategy, rank, node_of) for term in terms)


def _leaving(term: TrafficTerm, strategy: Strategy, rank: int, node_of: Sequence[int]) -> float:
    """The share of what `rank` sends for a term that goes to ranks of other nodes."""
    if term.axis == "pp" and term.op == "send":
        stages, line = ranks_of_stages(strategy), strategy.mesh.ranks("pp", rank)
        edges = [(line[a], line[b]) for a, b in pairwise(stages) if a != b]
        if term.what.startswith("gradients"):
            edges = [(b, a) for a, b in edges]
        own = [node_of[to] != node_of[rank] for of, to in edges if of == rank]
        return sum(own) / len(own) if own else 0.0
    group = _group(term, strategy, rank, node_of)
    if term.op == "all_to_all":
        return sum(node_of[other] != node_of[rank] for other in group) / max(len(group) - 1, 1)
    return float(node_of[group[(group.index(rank) + 1) % len(group)]] != node_of[rank])


def _group(term: TrafficTerm, strategy: Strategy, rank: int, node_of: Sequence[int]) -> Sequence[int]:
    """The ranks that take part."""
    if term.axis == strategy.summed_axis:
        whole = strategy.summed_group(rank)
        levels = levels_of(whole, node_of) if term.level else None
        of_level = (whole,) if levels is None else levels.within if term.level == WITHIN else levels.between
        return next(group for group in of_level if rank in group)
    line = strategy.mesh.ranks("dp" if term.axis == "shard" else term.axis, rank)
    if term.axis == "shard":
        at = line.index(rank) // strategy.shard * strategy.shard
        return line[at : at + strategy.shard]
    # What is tied lies on the first stage and on the last, where it is not on all.
    return line if term.ranks == len(line) else (line[0], line[-1])


def _delay(way: OperationSpeed) -> str:
    return f"{way.latency * 1e3:.3g} ms" if way.latency >= 1e-3 else f"{way.latency * 1e6:.0f} µs"
