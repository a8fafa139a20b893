"""Holds the measured speed of the links between the ranks of a cluster, and predicts how long operations take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from nbkit.mesh import WITHIN, levels_of
from nbkit.planner.stages import ranks_of_stages
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy


def ranks_of_node(node_of: Sequence[int]) -> int | None:
    """Return how many ranks a node has, or None if there is one node. node_of: see WorldLinks.

    If nodes have unequal numbers of ranks, return the largest number that divides each of them.
    """
    sizes = Counter(node_of).values()
    return gcd(*sizes) if len(sizes) > 1 else None


@dataclass(frozen=True)
class OperationSpeed:
    """The speed of an operation. latency: seconds for almost no bytes. speed: bytes per second and rank, if all send.

    gap: seconds after which the next operation may begin. It is less than the latency if several operations can be
    under way (the g of LogGP; Alexandrov et al. 1995). None: equal to the latency.
    """

    latency: float
    speed: float
    gap: float | None = None

    def holds(self, num_bytes: float) -> float:
        """Return the seconds for which an operation that sends `num_bytes` delays the next one."""
        return (self.latency if self.gap is None else self.gap) + num_bytes / self.speed

    def seconds(self, calls: float, num_bytes: float) -> float:
        """Return the seconds of `calls` operations that send `num_bytes` in total."""
        return calls * self.latency + num_bytes / self.speed


@dataclass(frozen=True)
class WorldLinks:
    """The links of a world of `ranks` ranks.

    ways: speeds by operation (all_to_all, all_reduce, all_gather, reduce_scatter, send). near: the speed of an
    all-to-all within nodes only. far: of a message from every rank to the rank in the same place on the next node.
    Both are None on one node. copy: bytes per second when all ranks copy at once, each into newly allocated memory.
    node_of: the node number of each rank. crowded: True if some ranks share a device or a link, which makes all slower.
    """

    ranks: int
    ways: Mapping[str, OperationSpeed]
    near: OperationSpeed | None
    far: OperationSpeed | None
    copy: float
    node_of: tuple[int, ...]
    crowded: bool

    def moving(self, sent: Sequence[int], received: Sequence[int], kept: Sequence[int]) -> float:
        """Return the seconds of one exchange.

        sent, received, kept: bytes of each rank; `kept` bytes are copied locally. The seconds are those of the rank
        that sends or receives most, plus those of the rank that copies most.
        """
        most = max((*sent, *received), default=0)
        # Packing sent bytes and unpacking received bytes are two more copies.
        carried = self.ways["all_to_all"].seconds(1, most) + 2 * most / self.copy if most else 0.0
        return carried + max(kept, default=0) / self.copy

    def way(self, term: TrafficTerm, *, spans_nodes: bool = False, apart: bool = False) -> OperationSpeed:
        """Return the speed of an operation of `term`.

        spans_nodes: True if its group has ranks on several nodes. apart: True if it also has only one rank on each.
        """
        way, one = self.ways.get(term.op, self.ways["all_to_all"]), self.ways["send"]
        latency, gap, speed = way.latency, way.gap, way.speed
        if term.op != "send" and one.latency < latency and self.ranks > 2:
            # In a ring, latency grows with the number of ranks; through a switch it does not. So interpolate between
            # one message and an operation of all ranks.
            share = (term.ranks - 2) / (self.ranks - 2)
            latency = one.latency + share * (latency - one.latency)
            gap = None if gap is None else min(gap, latency)
        if self.far is not None and self.near is not None:
            if not spans_nodes:
                # Only `near` was measured within nodes; all other measurements also went between nodes.
                closer = min(self.near.latency / self.far.latency, 1.0) if self.far.latency else 1.0
                return OperationSpeed(closer * latency, self.near.speed, None if gap is None else closer * gap)
            # In a ring over all ranks, only one rank of each node sends to other nodes. If `apart`, all ranks of a node
            # do, as in the measurement of `far`.
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
    """Return the bytes of `terms` that `rank` sends to other nodes. Collectives count as rings of ranks in order."""
    return sum(term.wire * _leaving(term, strategy, rank, node_of) for term in terms)


def _leaving(term: TrafficTerm, strategy: Strategy, rank: int, node_of: Sequence[int]) -> float:
    """Return the share of a term's bytes that `rank` sends to ranks of other nodes."""
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
    """Return the ranks that take part in the operation together with `rank`."""
    if term.axis == strategy.summed_axis:
        whole = strategy.summed_group(rank)
        levels = levels_of(whole, node_of) if term.level else None
        of_level = (whole,) if levels is None else levels.within if term.level == WITHIN else levels.between
        return next(group for group in of_level if rank in group)
    halves = ("shard", "ep", "edp")
    line = strategy.mesh.ranks("dp" if term.axis in halves else term.axis, rank)
    if term.axis in ("ep", "edp"):
        place, ep = line.index(rank), strategy.ep
        return line[place // ep * ep :][:ep] if term.axis == "ep" else line[place % ep :: ep]
    if term.axis == "shard":
        at = line.index(rank) // strategy.shard * strategy.shard
        return line[at : at + strategy.shard]
    # Tied weights are on the first and the last stage, unless they are on all.
    return line if term.ranks == len(line) else (line[0], line[-1])


def _delay(way: OperationSpeed) -> str:
    return f"{way.latency * 1e3:.3g} ms" if way.latency >= 1e-3 else f"{way.latency * 1e6:.0f} µs"
