"""Plans a switch: which rank sends which boxes of which tensors to which rank, and the order of the axes over ranks.

In an `ExchangePlan`, every rank receives exactly the elements that it must hold and does not hold yet. Nothing is
gathered. Every rank knows what all ranks hold before and after, so all compute the same plan. A tensor is named by a
key ("weight/blocks.0.up.weight", "exp_avg/..."). Keys whose tensors have the same layouts before and after share one
list of moves, so thousands of keys cost as much as a few dozen.

`placed` chooses the order of the axes over the ranks, if the strategy does not set it: tp may be the fastest or the
slowest axis. For example, four ranks under tp hold a quarter each. Under `dp=2 tp=2` with tp the slowest, ranks 0 and 1
need the first half, and each of them lacks one quarter. With tp the fastest, ranks 1 and 2 need halves of which they
hold nothing. The same is true in the other direction, and between tensor parallelism and ZeRO.

Over several nodes, tp and cp stay the fastest, so that ranks that communicate most are close to each other. Either pp
crosses nodes, with the hidden states of every row, or dp, with the gradients of a stage. The order whose traffic takes
less time on the links is chosen. If there is no difference, or it is unknown, the order that moves the fewest bytes
between nodes is chosen.

Another order of the ranks within a group would save a little more, but torch.distributed numbers them in ascending
order. Over 400 random switches between eight strategies, the choice of two orders saves 4.0 % of the bytes on 4 ranks
and 1.6 % on 8. With a free order within groups it would be 5.5 % and 2.3 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from nbkit.errors import TrainingError
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Box, Layout


def held(layout: Layout | None) -> tuple[Box, ...]:
    """Return the boxes of the global tensor that a layout holds; () for a rank without this tensor."""
    return () if layout is None else tuple(there for _, there in layout.pieces)


def within(inner: Box, outer: Box) -> bool:
    """Return True if all of `inner` lies in `outer`."""
    for at, length, start, room in zip(inner.start, inner.shape, outer.start, outer.shape, strict=True):
        if at < start or at + length > start + room:
            return False
    return True


def uncovered(boxes: Iterable[Box], covers: Sequence[Box]) -> list[Box]:
    """Return the parts of `boxes` that are outside of `covers`. They do not overlap if `boxes` do not overlap."""
    left = list(boxes)
    for cover in covers:
        if not left:
            break
        left = [rest for box in left for rest in _minus(box, cover)]
    return left


def overlap(mine: Layout | None, wanted: Layout | None) -> int:
    """Return the number of elements of the global tensor that both layouts hold."""
    if mine is None or wanted is None:
        return 0
    if mine is wanted:
        return mine.numel
    common = 0
    for _, a in mine.pieces:
        for _, b in wanted.pieces:
            elements = 1
            for start, length, at, room in zip(a.start, a.shape, b.start, b.shape, strict=True):
                side = min(start + length, at + room) - max(start, at)
                if side <= 0:
                    break
                elements *= side
            else:
                common += elements
    return common


def halves(box: Box, most: int) -> list[Box]:
    """Return `box` cut along its first dims into boxes of at most `most` elements, in the order of its rows."""
    if box.numel <= most:
        return [box]
    dim = next(d for d, length in enumerate(box.shape) if length > 1)
    first = box.shape[dim] // 2
    near = Box(box.start, (*box.shape[:dim], first, *box.shape[dim + 1 :]))
    start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
    far = Box(start, (*box.shape[:dim], box.shape[dim] - first, *box.shape[dim + 1 :]))
    return [*halves(near, most), *halves(far, most)]


def _minus(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole`: slabs before and after the hole along each dim, cut to it along earlier dims."""
    core = box.meet(hole)
    if core is None:
        return [box]
    slabs, start, shape = [], list(box.start), list(box.shape)
    for dim in range(len(start)):
        stop = start[dim] + shape[dim]
        near, far = core.start[dim], core.start[dim] + core.shape[dim]
        for low, high in ((start[dim], near), (far, stop)):
            if high > low:
                slabs.append(Box((*start[:dim], low, *start[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :])))
        start[dim], shape[dim] = near, far - near
    return slabs


Holding = Mapping[str, Layout]
"""The layout of each tensor that one rank holds, by key. It does not hold a tensor whose key is missing."""

_VARIANTS = 8


class Move(NamedTuple):
    """Rank `src` sends `box` (of the global tensor) to rank `dst`."""

    src: int
    dst: int
    box: Box


@dataclass(frozen=True)
class Alike:
    """Tensors that make the same moves. itemsize: bytes of an element. sent, received: bytes of one tensor, per rank.

    relayed: True if the senders have received the parts earlier in this exchange, to hand them on within their node.
    """

    keys: tuple[str, ...]
    itemsize: int
    moves: tuple[Move, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    relayed: bool = False


@dataclass(frozen=True)
class ExchangePlan:
    """The moves of a switch. old, new: what each rank holds. bytes, sent: the bytes that each rank receives, sends."""

    old: tuple[Holding, ...]
    new: tuple[Holding, ...]
    itemsize: Mapping[str, int]
    groups: tuple[Alike, ...]
    bytes: tuple[int, ...]
    sent: tuple[int, ...]
    node_of: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        old: Sequence[Holding],
        new: Sequence[Holding],
        itemsize: Mapping[str, int],
        *,
        node_of: Sequence[int] = (),
        relays: bool = True,
    ) -> ExchangePlan:
        """Return the exchange after which each rank that holds `old[rank]` holds `new[rank]`.

        A box is sent by the rank that has the least to send, among the ranks that hold the box. Ranks of the receiver's
        node are preferred.

        itemsize: bytes of an element, per key. node_of: the node of each rank; () for one node. relays: True to send a
        part that several ranks of a node lack only once to the node, to one of these ranks, which hands it on.
        Raises TrainingError if a layout has a gap, if the global shape of a tensor changes, or if no rank holds a part
        that is needed.
        """
        ranks, found = len(new), spreads(old, new, itemsize)
        _check(found)
        cells = [_cells(before, after) for (_, before, after), _ in found]
        _raise_missing(found, [lacking for _, lacking in cells])
        load, forced, free = [0] * ranks, [], []
        for number, ((size, _, _), keys) in enumerate(found):
            shared, direct = _shared(cells[number][0], node_of if relays else ())
            forced.append([Move(who[0], dst, box) for dst, box, who in direct if len(who) == 1])
            for move in forced[-1]:
                load[move.src] += move.box.numel * size * len(keys)
            # Equal tensors may come from different ranks. A few variants of the choice balance the bytes to send.
            choice = [cell for cell in direct if len(cell[2]) > 1]
            variants = min(len(keys), _VARIANTS) if choice or shared else 1
            free += [(number, keys[i::variants], choice, shared) for i in range(variants)]
        groups, relayed = [], []
        largest_first = sorted(
            free,
            key=lambda each: (
                -sum(box.numel for _, box, _ in (*each[2], *each[3])) * found[each[0]][0][0] * len(each[1])
            ),
        )
        for number, keys, choice, shared in largest_first:
            size, moves = found[number][0][0], list(forced[number])
            for dst, box, who in choice:
                near = [rank for rank in who if node_of[rank] == node_of[dst]] if node_of else ()
                src = min(near or who, key=lambda rank: (load[rank], rank))
                load[src] += box.numel * size * len(keys)
                moves.append(Move(src, dst, box))
            crossing, handed_on = _relayed(shared, node_of, load, size * len(keys))
            groups.append(_alike(tuple(keys), size, (*moves, *crossing), ranks))
            if handed_on:
                relayed.append(replace(_alike(tuple(keys), size, tuple(handed_on), ranks), relayed=True))
        groups += relayed
        received = [0] * ranks
        for group in groups:
            for rank, each in enumerate(group.received):
                received[rank] += each * len(group.keys)
        return cls(tuple(old), tuple(new), itemsize, tuple(groups), tuple(received), tuple(load), tuple(node_of))

    def without_relays(self) -> ExchangePlan:
        """Return the same exchange without relays: each rank gets everything from ranks that held it before."""
        if not any(group.relayed for group in self.groups):
            return self
        return ExchangePlan.of(self.old, self.new, self.itemsize, node_of=self.node_of, relays=False)

    @property
    def total_bytes(self) -> int:
        """Return the bytes that all ranks receive. No exchange between these layouts can move less."""
        return sum(self.bytes)

    @cached_property
    def pairs(self) -> dict[tuple[int, int], int]:
        """Return the bytes by (from rank, to rank), for the pairs that have any."""
        found: dict[tuple[int, int], int] = {}
        for group in self.groups:
            for src, dst, box in group.moves:
                found[src, dst] = found.get((src, dst), 0) + box.numel * group.itemsize * len(group.keys)
        return found

    def moves(self, src: int, dst: int) -> list[tuple[str, Box]]:
        """Return what `src` sends to `dst`, as (key, box of the global tensor)."""
        found = []
        for group in self.groups:
            boxes = [move.box for move in group.moves if (move.src, move.dst) == (src, dst)]
            found += [(key, box) for key in group.keys for box in boxes]
        return found

    def reversed(self, keys: Sequence[str]) -> ExchangePlan:
        """Return the exchange in the opposite direction, for these tensors only."""
        back = set(keys)
        old = [{key: layout for key, layout in holding.items() if key in back} for holding in self.new]
        new = [{key: layout for key, layout in holding.items() if key in back} for holding in self.old]
        return ExchangePlan.of(old, new, self.itemsize)


_Spread = tuple[int, tuple[Layout | None, ...], tuple[Layout | None, ...]]
_Cell = tuple[int, Box, tuple[int, ...]]


def spreads(
    old: Sequence[Holding], new: Sequence[Holding], itemsize: Mapping[str, int]
) -> list[tuple[_Spread, list[str]]]:
    """Return groups of keys with equal layouts: ((bytes of an element, layouts before, layouts after), keys).

    There is a layout for each rank. Tensors that no rank must hold afterwards are left out, since they are not sent.
    """
    # Look up layouts by identity first. So each is hashed once, and not once per key and rank.
    numbers: dict[Layout, int] = {}
    layouts: list[Layout] = []
    by_identity: dict[int, int] = {}

    def number(layout: Layout | None) -> int:
        if layout is None:
            return -1
        found = by_identity.get(id(layout))
        if found is None:
            found = by_identity[id(layout)] = numbers.setdefault(layout, len(numbers))
            if found == len(layouts):
                layouts.append(layout)
        return found

    grouped: dict[tuple[int, ...], list[str]] = {}
    for key in sorted({key for holding in new for key in holding}):
        signature = (itemsize[key], *[number(holding.get(key)) for holding in (*old, *new)])
        grouped.setdefault(signature, []).append(key)
    found: list[tuple[_Spread, list[str]]] = []
    for (size, *which), keys in grouped.items():
        every = tuple(None if i < 0 else layouts[i] for i in which)
        found.append(((size, every[: len(old)], every[len(old) :]), keys))
    return found


def _cells(before: Sequence[Layout | None], after: Sequence[Layout | None]) -> tuple[list[_Cell], list[_Cell]]:
    """Return two lists of (rank that lacks a box, box, ranks that hold it). The second is for boxes that none holds."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(before):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    apart = all(a.meet(b) is None for a, b in combinations(holders, 2))
    if not apart:
        # If boxes overlap, take small ones first: larger ones have the same elements, so more ranks can send them.
        holders = dict(sorted(holders.items(), key=lambda each: each[0].numel))
    cells: list[_Cell] = []
    lacking: list[_Cell] = []
    known: dict[tuple[int, int], list[tuple[Box, tuple[int, ...]]]] = {}
    for dst, (own, wanted) in enumerate(zip(before, after, strict=True)):
        if wanted is None or wanted is own:
            continue
        if (id(own), id(wanted)) not in known:
            missing = _missing(own, wanted)
            known[id(own), id(wanted)] = [each for box in missing for each in _sources(box, holders, apart)]
        for box, who in known[id(own), id(wanted)]:
            (cells if who else lacking).append((dst, box, who))
    return cells, lacking


def _shared(cells: Sequence[_Cell], node_of: Sequence[int]) -> tuple[list[_Cell], list[_Cell]]:
    """Split `cells` into the ones that can be relayed, and the others.

    A cell can be relayed if no rank of the receiver's node holds it, and several ranks of that node lack such cells.
    """
    far = [bool(node_of) and all(node_of[rank] != node_of[dst] for rank in who) for dst, _, who in cells]
    receivers: dict[int, set[int]] = {}
    for (dst, _, _), is_far in zip(cells, far, strict=True):
        if is_far:
            receivers.setdefault(node_of[dst], set()).add(dst)
    shared = [is_far and len(receivers[node_of[cell[0]]]) > 1 for cell, is_far in zip(cells, far, strict=True)]
    return (
        [cell for cell, together in zip(cells, shared, strict=True) if together],
        [cell for cell, together in zip(cells, shared, strict=True) if not together],
    )


def _relayed(
    shared: Sequence[_Cell], node_of: Sequence[int], load: list[int], size: int
) -> tuple[list[Move], list[Move]]:
    """Return two lists: moves that send each element once to each node, and moves that hand it on within the node.

    size: bytes of an element, summed over all tensors that make these moves. load: bytes that each rank sends; this
    function adds to it.
    """
    wanted: dict[int, dict[int, list[tuple[Box, tuple[int, ...]]]]] = {}
    for dst, box, who in shared:
        wanted.setdefault(node_of[dst], {}).setdefault(dst, []).append((box, who))
    crossing: list[Move] = []
    handed_on: list[Move] = []

    def send(src: int, dst: int, box: Box, into: list[Move]) -> None:
        load[src] += box.numel * size
        into.append(Move(src, dst, box))

    for ranks in wanted.values():
        here: list[Move] = []  # the moves to this node so far
        # The rank with the least to send receives first, and hands on to the others.
        for dst in sorted(ranks, key=lambda rank: (load[rank], rank)):
            own: list[Move] = []
            for box, who in ranks[dst]:
                left = [box]
                for _, gateway, there in here:
                    for hit in [hit for part in left if (hit := part.meet(there)) is not None]:
                        send(gateway, dst, hit, handed_on)
                    left = uncovered(left, (there,))
                for part in left:
                    send(min(who, key=lambda rank: (load[rank], rank)), dst, part, own)
            here += own
        crossing += here
    return crossing, handed_on


def _sources(missing: Box, holders: Mapping[Box, Sequence[int]], apart: bool) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the parts of `missing`, each with the ranks that hold the whole part; () if no rank does."""
    left = [missing]
    found: list[tuple[Box, tuple[int, ...]]] = []
    for source, ranks in holders.items():
        if missing.meet(source) is None:
            continue
        for hit in [hit for box in left if (hit := box.meet(source)) is not None]:
            found.append((hit, tuple(ranks) if apart else _holders_of(hit, holders)))
        left = uncovered(left, (source,))
        if not left:
            break
    return found + [(box, ()) for box in left]


def _missing(own: Layout | None, wanted: Layout) -> list[Box]:
    found: list[Box] = []
    for box in held(wanted):
        found += uncovered((box,), (*held(own), *found))
    return found


def _holders_of(box: Box, holders: Mapping[Box, Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({rank for source, ranks in holders.items() if within(box, source) for rank in ranks}))


def _alike(keys: tuple[str, ...], size: int, moves: tuple[Move, ...], ranks: int) -> Alike:
    sent, received = [0] * ranks, [0] * ranks
    for src, dst, box in moves:
        sent[src] += box.numel * size
        received[dst] += box.numel * size
    return Alike(keys, size, moves, tuple(sent), tuple(received))


def _check(found: list[tuple[_Spread, list[str]]]) -> None:
    for (_, before, after), keys in found:
        shapes = {layout.shape for layout in (*before, *after) if layout is not None}
        if len(shapes) > 1:
            raise TrainingError(
                f"The tensor {keys[0]!r} would change its shape in the switch.",
                numbers=" and ".join(str(shape) for shape in sorted(shapes)),
                hint="build both sides from the same model",
            )
        for layout in after:
            if layout is not None and sum(box.numel for box in held(layout)) != layout.numel:
                raise TrainingError(
                    f"The new layout of {keys[0]!r} has elements that belong to no part of the tensor.",
                    numbers=f"local shape {layout.local}, parts hold {sum(box.numel for box in held(layout))} elements",
                    hint="nbkit.check(model, strategy)",
                )


def _raise_missing(found: list[tuple[_Spread, list[str]]], lacking: list[list[_Cell]]) -> None:
    lines = [
        f"{key}[{', '.join(f'{at}:{at + n}' for at, n in zip(box.start, box.shape, strict=True))}] for rank {dst}"
        for (_, keys), cells in zip(found, lacking, strict=True)
        for key in keys
        for dst, box, _ in cells
    ]
    if lines:
        more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise TrainingError(
            "No rank holds tensors that the new strategy needs.",
            numbers="; ".join(lines[:8]) + more,
            hint="trainer.load(path) brings back a state that is whole",
        )


def orders(strategy: Strategy, *, one_node: bool | None = None) -> list[Strategy]:
    """Return `strategy` with the usual order of its axes, and with the other orders that may be better.

    On one node, tp may be the slowest axis; on several nodes, dp may be. There is only one order if `order=`, `places=`
    or `speeds=` is given. one_node: True if all ranks are on one node; None if that is unknown.
    """
    free = not (strategy.speeds or strategy.order or strategy.places)  # with speeds=, the places of ranks matter
    others = ("tp", "dp") if one_node is None else ("tp",) if one_node else ("dp",)
    slowest = ("", *others) if free else ("",)
    return list(dict.fromkeys(replace(strategy, slowest=axis) for axis in slowest))


def placed(strategy: Strategy, moved: Callable[[Strategy], Any], *, one_node: bool) -> Strategy:
    """Return `strategy` with the order for which `moved` is least; the usual order if there is no difference.

    moved: returns the cost of an order, such as (seconds of a step's traffic, bytes to move). Its errors are not
    caught.
    """
    found = orders(strategy, one_node=one_node)
    return min(found, key=moved) if len(found) > 1 else found[0]
