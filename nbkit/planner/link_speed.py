"""Holds the measured speed of the links between the ranks of a cluster, and predicts what operations take on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from nbkit.planner.traffic import Traffic


def ranks_of_node(node_of: Sequence[int]) -> int | None:
    """The most ranks that are neighbours on one node, counted from rank 0; None on one node. node_of: see Link.

    Where nodes have unequal numbers, what divides each of them.
    """
    sizes = Counter(node_of).values()
    return gcd(*sizes) if len(sizes) > 1 else None


@dataclass(frozen=True)
class Way:
    """latency: seconds of an operation of hardly any bytes. speed: bytes that a rank sends per second, all at once."""

    latency: float
    speed: float

    def seconds(self, calls: float, num_bytes: float) -> float:
        """Of `calls` operations that send `num_bytes` together."""
        return calls * self.latency + num_bytes / self.speed


@dataclass(frozen=True)
class Link:
    """The links of a world of `ranks`. ways: by operation (all_to_all, all_reduce, all_gather, reduce_scatter, send).

    near, far: an all-to-all within the nodes alone, and between them alone; far is None on one node. copy: bytes per
    second that every rank copies at once, into memory that it has just got. node_of: of each rank, the number of its
    node. crowded: some ranks share what they compute and send with, so that none is as fast as it would be alone.
    """

    ranks: int
    ways: Mapping[str, Way]
    near: Way | None
    far: Way | None
    copy: float
    node_of: tuple[int, ...]
    crowded: bool

    def moving(self, sent: Sequence[int], received: Sequence[int], kept: Sequence[int]) -> float:
        """Seconds of one exchange: the rank that sends or receives most, and the one that copies most of its own."""
        most = max((*sent, *received), default=0)
        # What is sent is packed, and what arrives is unpacked: two copies beside the way.
        carried = self.ways["all_to_all"].seconds(1, most) + 2 * most / self.copy if most else 0.0
        return carried + max(kept, default=0) / self.copy

    def seconds(self, term: Traffic, *, spans_nodes: bool = False) -> float:
        """Of the operations of a step, one after the other. spans_nodes: the group has ranks of several nodes."""
        way = self.ways.get(term.op, self.ways["all_to_all"])
        # In a ring, as for messages to everyone, the latency grows with the ranks.
        hops = 1.0 if term.op == "send" else (term.ranks - 1) / max(self.ranks - 1, 1)
        speed = way.speed
        if self.far is not None and self.near is not None:
            own = self.far if spans_nodes else self.near
            speed *= own.speed / min(self.far.speed, self.near.speed)
        return Way(way.latency * hops, speed).seconds(term.calls, term.wire)

    def __str__(self) -> str:
        way = self.ways["all_to_all"]
        text = f"{way.speed / 1e9:.3g} GB/s and {_delay(way)} between {self.ranks} ranks"
        if self.near is None or self.far is None:
            return text
        return (
            f"{self.near.speed / 1e9:.3g} GB/s within a node, {self.far.speed / 1e9:.3g} GB/s between nodes, "
            f"{_delay(way)}"
        )


def _delay(way: Way) -> str:
    return f"{way.latency * 1e3:.3g} ms" if way.latency >= 1e-3 else f"{way.latency * 1e6:.0f} µs"
