"""Cuts the plan of a switch into rounds, and gives each rank its part of every round.

Rounds keep buffers small and release memory early. Tensors that make the same moves are spread evenly over the whole
exchange. So every rank that has something to send does so in every round. The bytes that a rank holds change linearly
from the old model to the new one, so an exchange in place rarely holds more than the larger of the two.

`steps` gives the rounds as one rank sees them: which boxes of which tensors it sends to which rank, and where the boxes
that it receives belong.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from nbkit.errors import TrainingError
from nbkit.planner.exchange import Alike, ExchangePlan, Holding, Move, halves
from nbkit.tensor_layout import Box, Layout

_DEALS = 32
_OPEN = 8
_WINDOW = 16


class RoundPart(NamedTuple):
    """A part of a round: every tensor of `keys` makes `moves`. All have the same layouts. relayed: see Alike."""

    keys: tuple[str, ...]
    moves: tuple[Move, ...]
    relayed: bool = False


@dataclass
class Round:
    """Parts that are exchanged together. closes: keys that are complete afterwards. num_bytes: sent by all ranks."""

    parts: list[RoundPart] = field(default_factory=list)
    closes: list[str] = field(default_factory=list)
    num_bytes: int = 0


def rounds(plan: ExchangePlan, *, limit: int, in_place: int | None = None) -> list[Round]:
    """Return the exchange of `plan` in rounds. In each, no rank sends or receives more than `limit` bytes.

    A round may exceed `limit` by a single element. in_place: if given, tensors are moved one by one, in an order that
    keeps memory low, and the new tensors that a round begins take at most this many bytes on each rank (or the round
    begins only one). The list is the same on every rank. A round of 0 bytes needs no communication. Relayed parts come
    last, when their senders have them.
    """
    order = list(_evenly(plan) if in_place is None else _frugally(plan))
    made: list[Round] = []
    for relayed in (False, True):
        made += _filled(plan, [each for each in order if plan.groups[each[0]].relayed == relayed], limit, in_place)
    last = {key: at for at, each in enumerate(made) for part in each.parts for key in part.keys}
    for key, at in last.items():
        made[at].closes.append(key)
    return made


def _filled(
    plan: ExchangePlan, order: Sequence[tuple[int, tuple[str, ...]]], limit: int, in_place: int | None
) -> list[Round]:
    made: list[Round] = []
    filling: list[_Filling] = []
    for number, keys in order:
        for item in _items(plan, plan.groups[number], keys, limit):
            rest = item
            while rest.part.keys:
                for into in filling:
                    if (count := into.room(rest, limit, in_place)) > 0:
                        break
                else:
                    # In place, the order of the tensors keeps memory low. To keep it, fill only one round at a time.
                    if len(filling) == (_OPEN if in_place is None else 1):
                        made.append(filling.pop(0).round)
                    filling.append(into := _Filling(len(plan.new)))
                    count = max(1, into.room(rest, limit, in_place))
                into.add(rest, count)
                rest = rest._replace(part=rest.part._replace(keys=rest.part.keys[count:]))
    return made + [each.round for each in filling]


_Bytes = tuple[tuple[int, int], ...]


class _Item(NamedTuple):
    """A part that is put into rounds as a whole, or tensor by tensor.

    sent, received, fresh: (rank, bytes) for one tensor: sent, received, and allocated for new tensors. Ranks with 0
    bytes are left out.
    """

    part: RoundPart
    sent: _Bytes
    received: _Bytes
    fresh: _Bytes


class _Filling:
    """A round that is being filled, with the bytes that each rank sends, receives and allocates in it so far."""

    def __init__(self, ranks: int) -> None:
        self.round = Round()
        self.sent, self.received, self.fresh = [0] * ranks, [0] * ranks, [0] * ranks

    def room(self, item: _Item, limit: int, in_place: int | None) -> int:
        """Return how many tensors of `item` fit into the round."""
        count = len(item.part.keys)
        bounds = [(self.sent, item.sent, limit), (self.received, item.received, limit)]
        bounds += [(self.fresh, item.fresh, in_place)] if in_place is not None else []
        for used, each, most in bounds:
            for rank, size in each:
                if used[rank] + count * size > most:
                    count = max(0, most - used[rank]) // size
        return count

    def add(self, item: _Item, count: int) -> None:
        self.round.parts.append(item.part._replace(keys=item.part.keys[:count]))
        for used, each in ((self.sent, item.sent), (self.received, item.received), (self.fresh, item.fresh)):
            for rank, size in each:
                used[rank] += count * size
        self.round.num_bytes += count * sum(size for _, size in item.sent)


def _items(plan: ExchangePlan, group: Alike, keys: tuple[str, ...], limit: int) -> Iterator[_Item]:
    fresh = _where_any(_gain_and_loss(plan, group)[0])
    if max((*group.sent, *group.received)) <= limit:
        yield _Item(
            RoundPart(keys, group.moves, group.relayed), _where_any(group.sent), _where_any(group.received), fresh
        )
        return
    # The tensor is too large for one round. Cut its boxes, so that all ranks that send it do so at the same time.
    most = max(1, limit // group.itemsize // 8)
    queues = [[Move(src, dst, box) for box in halves(whole, most)] for src, dst, whole in group.moves]
    turns = [(i / len(queue), n, move) for n, queue in enumerate(queues) for i, move in enumerate(queue)]
    for key in keys:
        begins = fresh
        for _, _, move in sorted(turns, key=lambda each: each[:2]):
            size = move.box.numel * group.itemsize
            yield _Item(RoundPart((key,), (move,), group.relayed), ((move.src, size),), ((move.dst, size),), begins)
            begins = ()


def _where_any(sizes: Sequence[int]) -> _Bytes:
    return tuple((rank, size) for rank, size in enumerate(sizes) if size)


def _evenly(plan: ExchangePlan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (group, some of its keys), so that the keys of each group are spread evenly over the exchange."""
    dealt = []
    for number, group in enumerate(plan.groups):
        deals = min(len(group.keys), _DEALS)
        for i in range(deals):
            first, last = i * len(group.keys) // deals, (i + 1) * len(group.keys) // deals
            dealt.append(((i + 0.5) / deals, number, group.keys[first:last]))
    for _, number, keys in sorted(dealt, key=lambda each: each[:2]):
        yield number, keys


def _frugally(plan: ExchangePlan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (group, one of its keys): of the next few keys, always the one that adds least to the fullest rank."""
    each = [_gain_and_loss(plan, group) for group in plan.groups]
    old = [sum(_size(holding, key, plan.itemsize) for key in holding) for holding in plan.old]
    new = [sum(_size(holding, key, plan.itemsize) for key in holding) for holding in plan.new]
    # level: bytes above the larger of the two models, per rank. Tensors that the new model lacks stay until the end.
    level = [before - max(before, after) for before, after in zip(old, new, strict=True)]
    turns = [(0.5 / len(group.keys), number, 0) for number, group in enumerate(plan.groups)]
    heapq.heapify(turns)
    while turns:
        window = [heapq.heappop(turns) for _ in range(min(_WINDOW, len(turns)))]
        best = min(window, key=partial(_strain, level, each))
        _, number, at = best
        gain, loss = each[number]
        level = [now + more - less for now, more, less in zip(level, gain, loss, strict=True)]
        group = plan.groups[number]
        yield number, (group.keys[at],)
        for turn in window:
            if turn is not best:
                heapq.heappush(turns, turn)
        if at + 1 < len(group.keys):
            heapq.heappush(turns, ((at + 1.5) / len(group.keys), number, at + 1))


def _strain(
    level: Sequence[int], each: Sequence[tuple[Sequence[int], Sequence[int]]], turn: tuple[float, int, int]
) -> tuple[int, int]:
    gain, loss = each[turn[1]]
    during = [at + more for at, more in zip(level, gain, strict=True)]
    return max(during), max(at - less for at, less in zip(during, loss, strict=True))


def _gain_and_loss(plan: ExchangePlan, group: Alike) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two tuples of bytes per rank: what one new tensor of the group takes, and what its old tensor frees."""
    key = group.keys[0]
    gain, loss = (tuple(_size(holding, key, plan.itemsize) for holding in side) for side in (plan.new, plan.old))
    return gain, loss


def _size(holding: Holding, key: str, itemsize: Mapping[str, int]) -> int:
    return 0 if (layout := holding.get(key)) is None else layout.numel * itemsize[key]


@dataclass(frozen=True)
class BoxPair:
    """Two boxes of one shape with the same elements: `here` in one tensor, `there` in another."""

    here: Box
    there: Box


@dataclass(frozen=True)
class Copy:
    """Parts of tensors that a rank holds both before and after. here: in the new tensor; there: in the old one."""

    keys: tuple[str, ...]
    places: tuple[BoxPair, ...]


@dataclass(frozen=True)
class WirePiece:
    """A box of each tensor of `keys`, sent one after the other. here: in the tensor; there: in the box.

    relayed: True if it is sent from the new tensor, which has received it in an earlier round.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    places: tuple[BoxPair, ...]
    relayed: bool = False


@dataclass
class RankRound:
    """A round as one rank sees it.

    sends[r], receives[r]: pieces exchanged with rank r, in the order in which they are sent. sent, received: their
    bytes. opens, closes: the keys whose first or last round this is. They are the same on every rank.
    """

    ranks: int
    is_local: bool
    closes: list[str]
    opens: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    sends: list[list[WirePiece]] = field(init=False)
    receives: list[list[WirePiece]] = field(init=False)
    sent: list[int] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sends, self.receives = [[] for _ in range(self.ranks)], [[] for _ in range(self.ranks)]
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks


def steps(plan: ExchangePlan, made: Sequence[Round], rank: int) -> list[RankRound]:
    """Return the rounds `made` of `plan` as `rank` sees them.

    Raises TrainingError if they would not fill every element of the rank's new tensors.
    """
    old, new = plan.old[rank], plan.new[rank]
    mine: dict[int, list[Move]] = {}
    common: dict[tuple[Layout | None, Layout], tuple[BoxPair, ...]] = {}
    filled = dict.fromkeys(new, 0)
    found, opened = [], set[str]()
    for each in made:
        step = RankRound(len(plan.new), each.num_bytes == 0, each.closes)
        for keys, moves, relayed in each.parts:
            size, before, after = plan.itemsize[keys[0]], old.get(keys[0]), new.get(keys[0])
            if id(moves) not in mine:
                mine[id(moves)] = [move for move in moves if rank in (move.src, move.dst)]
            for src, dst, box in mine[id(moves)]:
                sends = src == rank
                layout = before if sends and not relayed else after
                assert layout is not None
                places = _places(layout, box)
                (step.sends[dst] if sends else step.receives[src]).append(WirePiece(keys, box.shape, places, relayed))
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


def _places(layout: Layout, box: Box) -> tuple[BoxPair, ...]:
    """Return the parts of the local tensor that `box` of the global tensor covers."""
    found = []
    for here, there in layout.pieces:
        if (part := there.meet(box)) is not None:
            found.append(BoxPair(part.moved(there.start, here.start), part.moved(box.start, (0,) * len(box.start))))
    return tuple(found)


def _copies(before: Layout, after: Layout) -> tuple[BoxPair, ...]:
    found = []
    for here, there in after.pieces:
        for place in _places(before, there):
            found.append(BoxPair(place.there.moved((0,) * len(here.start), here.start), place.here))
    return tuple(found)


def _count(filled: dict[str, int], keys: Sequence[str], places: Sequence[BoxPair]) -> None:
    elements = sum(place.here.numel for place in places)
    for key in keys:
        filled[key] += elements


def _check_filled(rank: int, new: Mapping[str, Layout], filled: Mapping[str, int]) -> None:
    lacking = [f"{key}: {filled[key]} of {layout.numel}" for key, layout in new.items() if filled[key] != layout.numel]
    if lacking:
        raise TrainingError(
            f"The exchange would not fill all new tensors of rank {rank}.",
            numbers="elements: " + "; ".join(lacking[:8]) + (f"; {len(lacking) - 8} more" if len(lacking) > 8 else ""),
        )
