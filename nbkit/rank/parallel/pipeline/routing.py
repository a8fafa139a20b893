"""The route of each message of a pipeline, read from the lists of operations: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nbkit.schedules import Op


class Message(NamedTuple):
    """What an operation of `stage` on micro-batch `micro` needs from a neighbour: activations, or their gradient."""

    gradient: bool
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{'the gradient' if self.gradient else 'the input'} of stage {self.stage}, micro-batch {self.micro}"


class Place(NamedTuple):
    """An operation: the rank of the pipeline, and the position in that rank's list."""

    rank: int
    at: int


@dataclass(frozen=True)
class Routes:
    """The messages of one rank.

    needs, gives: for each of its operations, what has to arrive before it and what it sends; None where nothing
    does, or where the neighbour is on this rank. source, target: the operation at the other end.
    arrivals: for each rank that sends to this one, its messages in the order of its list.
    """

    needs: tuple[Message | None, ...]
    gives: tuple[Message | None, ...]
    source: dict[Message, Place]
    target: dict[Message, Place]
    arrivals: dict[int, tuple[Message, ...]]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Op]], rank: int, rank_of: Callable[[int], int], num_stages: int) -> Routes:
        """The messages of `rank` in a pipeline whose ranks follow `lists`."""
        user: dict[Message | None, Place] = {
            _need(op): Place(r, i) for r, ops in enumerate(lists) for i, op in enumerate(ops)
        }

        def crossing(message: Message | None, sender: int) -> Message | None:
            """`message`, if it leaves `sender` for another rank that uses it."""
            return message if message is not None and user[message].rank != sender else None

        gives = tuple(crossing(_give(op, num_stages), rank) for op in lists[rank])
        source: dict[Message, Place] = {}
        arrivals: dict[int, list[Message]] = {}
        for peer, ops in enumerate(lists):
            for i, op in enumerate(ops):
                message = crossing(_give(op, num_stages), peer)
                if message is not None and user[message].rank == rank:
                    source[message] = Place(peer, i)
                    arrivals.setdefault(peer, []).append(message)
        needs = tuple(need if (need := _need(op)) in source else None for op in lists[rank])
        target = {message: user[message] for message in gives if message is not None}
        return cls(needs, gives, source, target, {peer: tuple(some) for peer, some in arrivals.items()})


def _need(op: Op) -> Message | None:
    return Message(op.kind != "F", op.stage, op.micro) if op.kind != "W" else None


def _give(op: Op, num_stages: int) -> Message | None:
    if op.kind == "F":
        return Message(False, op.stage + 1, op.micro) if op.stage + 1 < num_stages else None
    return Message(True, op.stage - 1, op.micro) if op.kind != "W" and op.stage else None
