"""Takes boxes away from others, exactly, and counts how much two layouts have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbkit.tensor_layout import Box, Layout


def held(layout: Layout | None) -> tuple[Box, ...]:
    """The parts of the global tensor that a layout holds; () for a rank without this tensor."""
    return () if layout is None else tuple(there for _, there in layout.pieces)


def within(inner: Box, outer: Box) -> bool:
    """Whether all of `inner` lies in `outer`."""
    for at, length, start, room in zip(inner.start, inner.shape, outer.start, outer.shape, strict=True):
        if at < start or at + length > start + room:
            return False
    return True


def uncovered(boxes: Iterable[Box], covers: Sequence[Box]) -> list[Box]:
    """What `covers` leave of `boxes`: rectangles that do not overlap each other if those of `boxes` do not."""
    left = list(boxes)
    for cover in covers:
        if not left:
            break
        left = [rest for box in left for rest in _minus(box, cover)]
    return left


def overlap(mine: Layout | None, wanted: Layout | None) -> int:
    """Elements of the global tensor that both hold."""
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
    """`box` cut along its first dims into boxes of at most `most` elements, in the order of its rows."""
    if box.numel <= most:
        return [box]
    dim = next(d for d, length in enumerate(box.shape) if length > 1)
    first = box.shape[dim] // 2
    near = Box(box.start, (*box.shape[:dim], first, *box.shape[dim + 1 :]))
    start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
    far = Box(start, (*box.shape[:dim], box.shape[dim] - first, *box.shape[dim + 1 :]))
    return [*halves(near, most), *halves(far, most)]


def _minus(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`: a slab before and one behind the hole along each dim, the dims before narrowed to it."""
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
