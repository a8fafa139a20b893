"""Which rank backs up which part of the state: every element once, by a rank that holds it.

What the optimizer updates is what is shared out, as the layouts of a strategy say; a weight and all that the optimizer
keeps of it go together. On CPU ranks nothing where every rank holds everything: each is a backup of all others. On GPUs
they are none: when a rank dies, the hosts of the others have mostly enqueued the update behind the reduction that is
then broken off, and the weights of all of them are torn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbkit.planner.reshard.boxes import held, uncovered
from nbkit.rank.parallel.shard_layouts import RankLayouts
from nbkit.tensor_layout import Box, Layout

Shares = Mapping[str, tuple[Box, ...]]
"""name of a parameter, or "buffer/NAME" -> boxes of the global tensor."""


def shares_of(rank_layouts: RankLayouts, rank: int, *, all_may_tear: bool = False) -> Shares | None:
    """What `rank` backs up, by the same rule on every rank, without a message; None where no rank backs up anything.

    all_may_tear: one error may leave no rank with whole weights, as it may on GPUs.
    """
    spread = [
        {**of_params, **{f"buffer/{name}": layout for name, layout in of_buffers.items()}}
        for of_params, of_buffers in zip(rank_layouts.held, rank_layouts.buffers, strict=True)
    ]
    alike = all(one.keys() == spread[0].keys() and all(each.is_whole for each in one.values()) for one in spread)
    if alike and not all_may_tear:
        return None
    load = [0] * len(spread)
    mine: dict[str, list[Box]] = {}
    for name in sorted({name for one in spread for name in one}):
        for box, ranks in _cells([one.get(name) for one in spread]):
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += box.numel
            if writer == rank:
                mine.setdefault(name, []).append(box)
    return {name: tuple(boxes) for name, boxes in mine.items()}


def _cells(spread: Sequence[Layout | None]) -> list[tuple[Box, list[int]]]:
    """Boxes that do not overlap and cover all that is held: (box, ranks that hold it)."""
    holders: dict[Box, list[int]] = {}
    for rank, layout in enumerate(spread):
        for box in held(layout):
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, list[int]]] = []
    for box, ranks in holders.items():
        found += [(rest, ranks) for rest in uncovered((box,), [taken for taken, _ in found])]
    return found


def beside(shape: tuple[int, ...], boxes: Sequence[Box]) -> Layout:
    """A layout of one tensor that holds `boxes` of a global one of `shape`, one behind the other along dim 0."""
    if not shape:
        return Layout.whole(())
    pieces, at = [], 0
    for box in boxes:
        pieces.append((Box((at, *[0] * (len(shape) - 1)), box.shape), box))
        at += box.shape[0]
    return Layout(shape, (at, *(max(box.shape[d] for box in boxes) for d in range(1, len(shape)))), tuple(pieces))
