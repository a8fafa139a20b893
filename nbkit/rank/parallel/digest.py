"""One number for the state of a job, whatever strategy holds it: equal before and after a switch.

Per tensor the sum, mod 2^64, of hash(index in the global tensor, bits of the element) over all elements; then sha256
over the sorted (key, shape, sum). A sum does not ask who holds which element, so each rank hashes some of those that
it has, and one all-reduce of 8 bytes per tensor adds them up. The hash is splitmix64's finaliser (Steele, Lea, Flood,
Fast splittable pseudorandom number generators, 2014) in int64, which wraps as mod 2^64 does. It is one-to-one in the
bits: a single changed element always shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.layout import Box, Layout, bounds
from nbkit.planner.cover import halves, held, uncovered

__all__ = ["digest", "scratch_bytes", "sums"]

_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 22
"""Elements hashed at once. On a CPU the int64 tensors of it stay in a core's cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX, _VALUE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def digest(
    state: Mapping[str, tuple[Tensor, Layout]],
    holdings: Sequence[Mapping[str, Layout]],
    *,
    rank: int,
    device: torch.device,
) -> str:
    """64 hexadecimal digits, the same on every rank. Collective: one all-reduce of 8 bytes per tensor.

    state: this rank's tensors. holdings: the layouts of all ranks, by rank; elements that several hold are shared out
    among them, and each counts once over the world. device: one that the process group can send from. Raises
    TrainingError for complex128, which has no integer of its size.
    """
    shapes = {key: layout.shape for holding in holdings for key, layout in holding.items()}
    keys = sorted(shapes)
    total = sums(state, holdings, keys, rank=rank).to(device)
    if len(holdings) > 1:
        dist.all_reduce(total)
    lines = [f"{key} {shapes[key]} {value % (1 << 64):016x}\n" for key, value in zip(keys, total.tolist(), strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def scratch_bytes(*states: Mapping[str, tuple[Tensor, Layout]]) -> int:
    """What a digest of any of `states` takes beside it at a time: int64 of a chunk, for bits, places and a shift."""
    elements = max((tensor.numel() for state in states for tensor, _ in state.values()), default=0)
    return 4 * 8 * min(elements, _CHUNK)


@torch.no_grad()
def sums(
    state: Mapping[str, tuple[Tensor, Layout]],
    holdings: Sequence[Mapping[str, Layout]],
    keys: Sequence[str],
    *,
    rank: int,
) -> Tensor:
    """What this rank adds to the sum of each of `keys`: int64, on the device of most tensors. Not collective."""
    shares: dict[tuple[int, ...], list[tuple[Box, Box]]] = {}
    found = []
    for key in keys:
        layouts = [holding.get(key) for holding in holdings]
        if key not in state:
            found.append(torch.zeros((), dtype=torch.int64))
            continue
        signature = tuple(id(layout) for layout in layouts)
        if signature not in shares:
            shares[signature] = _share(layouts, rank)
        found.append(_sum(key, state[key][0], layouts[rank], shares[signature]))
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    home = max((each.device for each in found), key=lambda device: device.type != "cpu")
    return torch.stack([each.to(home) for each in found])


def _share(layouts: Sequence[Layout | None], rank: int) -> list[tuple[Box, Box]]:
    """What `rank` hashes: (box of its local tensor, the same in the global one)."""
    holders: dict[Box, list[int]] = {}
    for other, layout in enumerate(layouts):
        for box in held(layout):
            holders.setdefault(box, []).append(other)
    order = {box: (ranks[0], box.start, box.shape) for box, ranks in holders.items()}
    own = layouts[rank]
    found = []
    for here, there in own.pieces if own is not None else ():
        # Where boxes overlap without being equal, the one with the lowest rank counts.
        before = [box for box in holders if order[box] < order[there]]
        for box in uncovered((there,), before):
            ranks = holders[there]
            if (part := _part(box, len(ranks), ranks.index(rank))) is not None:
                found.append((part.moved(there.start, here.start), part))
    return found


def _part(box: Box, parts: int, index: int) -> Box | None:
    """Part `index` of `parts` nearly equal ones along the longest dim, None when it is empty."""
    if not box.shape:
        return box if index == 0 else None
    dim = max(range(len(box.shape)), key=lambda d: box.shape[d])
    low, high = bounds(box.shape[dim], parts, index)
    start = (*box.start[:dim], box.start[dim] + low, *box.start[dim + 1 :])
    return Box(start, (*box.shape[:dim], high - low, *box.shape[dim + 1 :])) if high > low else None


def _sum(key: str, tensor: Tensor, layout: Layout | None, share: Sequence[tuple[Box, Box]]) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if layout is None or tuple(tensor.shape) != layout.local or tensor.element_size() not in _BITS:
        raise TrainingError(
            f"The tensor {key!r} has no digest.",
            numbers=f"{tuple(tensor.shape)} {tensor.dtype}, its layout holds {layout and layout.local}",
            hint="complex64 has one, complex128 has not",
        )
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    chunk = _CPU_CHUNK if tensor.device.type == "cpu" else _CHUNK
    for here, there in share:
        for part in halves(there, chunk):
            mixed = bits[part.moved(there.start, here.start).slices].to(torch.int64, copy=True).mul_(_signed(_VALUE))
            mixed += _places(part, layout.shape, tensor.device)
            spare = torch.empty_like(mixed)
            for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
                # A signed shift draws the sign along; the mask makes it the unsigned one.
                torch.bitwise_right_shift(mixed, shift, out=spare)
                mixed ^= spare.bitwise_and_((1 << (64 - shift)) - 1)
                if factor != 1:
                    mixed *= _signed(factor)
            total += mixed.sum()
    return total


def _places(box: Box, shape: Sequence[int], device: torch.device) -> Tensor:
    """index in the flattened global tensor x _INDEX, of every element of `box`; broadcasts to its shape."""
    found = torch.zeros((1,) * len(box.shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(box.shape))):
        start, length = box.start[dim], box.shape[dim]
        along = torch.arange(start, start + length, dtype=torch.int64, device=device).mul_(_signed(stride * _INDEX))
        found = found + along.view([length if d == dim else 1 for d in range(len(box.shape))])
        stride *= shape[dim]
    return found


def _signed(number: int) -> int:
    """The int64 of the same bits mod 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
