"""A plan as one rank carries it out: what it cuts out of which tensor for whom, and where what it gets belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbkit.errors import TrainingError
from nbkit.planner.reshard.exchange import Move, Plan
from nbkit.planner.reshard.rounds import Round
from nbkit.tensor_layout import Box, Layout


@dataclass(frozen=True)
class Place:
    """`here` of one tensor is `there` of another: two boxes of one shape."""

    here: Box
    there: Box


@dataclass(frozen=True)
class Copy:
    """What a rank holds before and after. here: in the new tensor, there: in the old one."""

    keys: tuple[str, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Piece:
    """A box on the wire, for each of `keys` one behind the other. here: in the tensor, there: in the box.

    relayed: it is sent from the new tensor, which has got it in an earlier round.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    relayed: bool = False


@dataclass
class Step:
    """A round as one rank sees it. sends[r], receives[r]: with rank r, in the order of the wire; sent, received: bytes.

    opens, closes: the keys of which this is the first, and the last round, on every rank.
    """

    ranks: int
    is_local: bool
    closes: list[str]
    opens: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    sends: list[list[Piece]] = field(init=False)
    receives: list[list[Piece]] = field(init=False)
    sent: list[int] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sends, self.receives = [[] for _ in range(self.ranks)], [[] for _ in range(self.ranks)]
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks


def steps(plan: Plan, made: Sequence[Round], rank: int) -> list[Step]:
    """`made`, the rounds of `plan`, as `rank` sees them.

    Raises TrainingError when they would leave an element of the rank's new tensors unfilled, with what is missing.
    """
    old, new = plan.old[rank], plan.new[rank]
    mine: dict[int, list[Move]] = {}
    common: dict[tuple[Layout | None, Layout], tuple[Place, ...]] = {}
    filled = dict.fromkeys(new, 0)
    found, opened = [], set[str]()
    for each in made:
        step = Step(len(plan.new), each.num_bytes == 0, each.closes)
        for keys, moves, relayed in each.parts:
            size, before, after = plan.itemsize[keys[0]], old.get(keys[0]), new.get(keys[0])
            if id(moves) not in mine:
                mine[id(moves)] = [move for move in moves if rank in (move.src, move.dst)]
            for src, dst, box in mine[id(moves)]:
                sends = src == rank
                layout = before if sends and not relayed else after
                assert layout is not None
                places = _places(layout, box)
                (step.sends[dst] if sends else step.receives[src]).append(Piece(keys, box.shape, places, relayed))
                if sends:
                    step.sent[dst] += len(keys) * box.numel * size
                else:
                    step.received[src] += len(keys) * box.numel * size
                    _count(filled, keys, places)
            begun = tuple(key for key in keys if key not in opened)
            step.opens += begun
            opened.update(begun)
            if begun and before is not None and after is not None:
                if (before, after) not in common:
                    common[before, after] = _copies(before, after)
                step.copies.append(Copy(begun, common[before, after]))
                _count(filled, begun, common[before, after])
        found.append(step)
    _check_filled(rank, new, filled)
    return found


def _places(layout: Layout, box: Box) -> tuple[Place, ...]:
    """Where `box` of the global tensor is in the local one."""
    found = []
    for here, there in layout.pieces:
        if (part := there.meet(box)) is not None:
            found.append(Place(part.moved(there.start, here.start), part.moved(box.start, (0,) * len(box.start))))
    return tuple(found)


def _copies(before: Layout, after: Layout) -> tuple[Place, ...]:
    found = []
    for here, there in after.pieces:
        for place in _places(before, there):
            found.append(Place(place.there.moved((0,) * len(here.start), here.start), place.here))
    return tuple(found)


def _count(filled: dict[str, int], keys: Sequence[str], places: Sequence[Place]) -> None:
    elements = sum(place.here.numel for place in places)
    for key in keys:
        filled[key] += elements


def _check_filled(rank: int, new: Mapping[str, Layout], filled: Mapping[str, int]) -> None:
    lacking = [f"{key}: {filled[key]} of {layout.numel}" for key, layout in new.items() if filled[key] != layout.numel]
    if lacking:
        raise TrainingError(
            f"The exchange would not fill the new tensors of rank {rank}.",
            numbers="elements: " + "; ".join(lacking[:8]) + (f"; {len(lacking) - 8} more" if len(lacking) > 8 else ""),
        )
