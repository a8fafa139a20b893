"""A digest of the state of a job that does not depend on the strategy: it is equal before and after a switch.

For each tensor, hash(index in the global tensor, bits of the element) is summed mod 2^64 over all elements. The digest
is the sha256 of the sorted (key, shape, sum). The sum does not depend on which rank holds which element. So each rank
hashes some of its elements, and one all-reduce of 8 bytes per tensor adds up the sums.

The hash has 32 bits, or 64 for elements of 8 bytes. It uses the finalisers of MurmurHash3 (Appleby 2011) and splitmix64
(Steele, Lea, Flood 2014) in integers with overflow. Training may wait for the digest, and 32 bits take a quarter of the
time of 64. The hash is one-to-one in the bits, so a single changed element always changes the digest. Of other random
errors, one in 2^32 is not detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.planner.exchange import halves, held, uncovered
from nbkit.rank.device import accelerator
from nbkit.tensor_layout import Box, Layout, bounds

_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 20
"""Number of elements hashed at once. On a CPU they fit in the cache of a core."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Hash(NamedTuple):
    """A hash function: x = value * bits + index * place, then for each (shift, factor) x ^= x >> shift, x *= factor."""

    dtype: torch.dtype
    index: int  # type: ignore[assignment]  # not tuple's method
    value: int
    rounds: tuple[tuple[int, int], ...]


_HASH_32 = _Hash(torch.int32, 0x9E3779B1, 0x27D4EB2F, ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)))
_HASH_64 = _Hash(
    *(torch.int64, 0x9E3779B97F4A7C15, 0xD1342543DE82EF95),
    ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)),
)


def digest(
    state: Mapping[str, tuple[Tensor, Layout]],
    layouts_by_rank: Sequence[Mapping[str, Layout]],
    *,
    rank: int,
    device: torch.device,
) -> str:
    """Return 64 hexadecimal digits, the same on every rank. All ranks must call it: it all-reduces 8 bytes per tensor.

    state: this rank's tensors. layouts_by_rank: the layouts of all ranks. Elements that several ranks hold are divided
    among them, so that each element counts once. device: a device from which the process group can send. Raises
    TrainingError for complex128, because no integer dtype has its size.
    """
    shapes = {key: layout.shape for theirs in layouts_by_rank for key, layout in theirs.items()}
    keys = sorted(shapes)
    total = sums(state, layouts_by_rank, keys, rank=rank).to(device)
    if len(layouts_by_rank) > 1:
        dist.all_reduce(total)
    lines = [f"{key} {shapes[key]} {value % (1 << 64):016x}\n" for key, value in zip(keys, total.tolist(), strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def scratch_bytes(*states: Mapping[str, tuple[Tensor, Layout]]) -> int:
    """Return the maximum bytes that a digest of one of `states` needs: a chunk's hash, a shifted copy, and indices."""
    elements = max((sum(tensor.numel() for tensor, _ in state.values()) for state in states), default=0)
    return 4 * 8 * min(elements, _CHUNK)


@torch.no_grad()
def sums(
    state: Mapping[str, tuple[Tensor, Layout]],
    layouts_by_rank: Sequence[Mapping[str, Layout]],
    keys: Sequence[str],
    *,
    rank: int,
) -> Tensor:
    """Return this rank's part of each sum in the order of `keys`: int64, on an accelerator if any. Sends nothing."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    numbers: dict[Layout | None, int] = {None: 0}
    known = {
        id(layout): numbers.setdefault(layout, len(numbers)) for theirs in layouts_by_rank for layout in theirs.values()
    }
    for place, key in enumerate(keys):
        if key in state:
            spread = tuple([known.get(id(theirs.get(key)), 0) for theirs in layouts_by_rank])
            tensor = state[key][0]
            alike.setdefault((spread, tensor.element_size(), tensor.device), []).append(place)
    home = max((device for _, _, device in alike), key=accelerator().holds, default=torch.device("cpu"))
    found, hasher = torch.zeros(len(keys), dtype=torch.int64, device=home), _Hasher()
    for places in alike.values():
        layouts = [theirs.get(keys[places[0]]) for theirs in layouts_by_rank]
        parts = [_bits(keys[place], state[keys[place]][0], layouts[rank]) for place in places]
        found[places] = hasher.sums(parts, layouts[rank], _share(layouts, rank)).to(home)
    return found


def _share(layouts: Sequence[Layout | None], rank: int) -> list[tuple[Box, Box]]:
    """Return the boxes that `rank` hashes: (box in its local tensor, the same box in the global tensor)."""
    holders: dict[Box, list[int]] = {}
    for other, layout in enumerate(layouts):
        for box in held(layout):
            holders.setdefault(box, []).append(other)
    order = {box: (ranks[0], box.start, box.shape) for box, ranks in holders.items()}
    own = layouts[rank]
    found = []
    for here, there in own.pieces if own is not None else ():
        # If boxes overlap without being equal, the box of the lowest rank counts.
        before = [box for box in holders if order[box] < order[there]]
        for box in uncovered((there,), before):
            ranks = holders[there]
            if (part := _part(box, len(ranks), ranks.index(rank))) is not None:
                found.append((part.moved(there.start, here.start), part))
    return found


def _part(box: Box, parts: int, index: int) -> Box | None:
    """Return part `index` of `parts` nearly equal parts along the longest dim, or None if it is empty."""
    if not box.shape:
        return box if index == 0 else None
    dim = max(range(len(box.shape)), key=lambda d: box.shape[d])
    low, high = bounds(box.shape[dim], parts, index)
    start = (*box.start[:dim], box.start[dim] + low, *box.start[dim + 1 :])
    return Box(start, (*box.shape[:dim], high - low, *box.shape[dim + 1 :])) if high > low else None


def _bits(key: str, tensor: Tensor, layout: Layout | None) -> Tensor:
    if layout is None or tuple(tensor.shape) != layout.local or tensor.element_size() not in _BITS:
        raise TrainingError(
            f"nbkit cannot compute a digest of the tensor {key!r}.",
            numbers=f"{tuple(tensor.shape)} {tensor.dtype}, its layout holds {layout and layout.local}",
            hint="complex64 has a digest, complex128 does not",
        )
    return tensor.detach().view(_BITS[tensor.element_size()])


class _Hasher:
    """Hashes chunk after chunk in the same memory, and small tensors of one layout together."""

    def __init__(self) -> None:
        self._room: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def sums(self, every: Sequence[Tensor], layout: Layout | None, share: Sequence[tuple[Box, Box]]) -> Tensor:
        """Return for each tensor the sum over the elements in `share`. All tensors have the same layout.

        share: (box in the tensors, the same box in the global tensors).
        """
        device = every[0].device
        total = torch.zeros(len(every), dtype=torch.int64, device=device)
        of = _HASH_64 if every[0].element_size() == 8 else _HASH_32
        shape = layout.shape if layout is not None else ()
        for here, there in share:
            for part in halves(there, _chunk(device)):
                own = part.moved(there.start, here.start).slices
                places = _places(part, shape, of, device)
                at_once = max(1, _chunk(device) // max(part.numel, 1))
                for first in range(0, len(every), at_once):
                    some = [bits[own] for bits in every[first : first + at_once]]
                    hashed = self._hashed(some, places, of).view(len(some), part.numel)
                    total[first : first + at_once] += hashed.sum(1, dtype=torch.int64)
        return total

    def _hashed(self, some: Sequence[Tensor], places: Sequence[Tensor], of: _Hash) -> Tensor:
        mixed, spare = self._two((len(some), *some[0].shape), of.dtype, some[0].device)
        width = 8 * of.dtype.itemsize
        for row, bits in zip(mixed, some, strict=True):
            row.copy_(bits)
        mixed *= _signed(of.value, width)
        for along in places:
            mixed += along
        for shift, factor in of.rounds:
            # A signed shift copies the sign bit. The mask makes it an unsigned shift.
            torch.bitwise_right_shift(mixed, shift, out=spare)
            mixed ^= spare.bitwise_and_((1 << (width - shift)) - 1)
            if factor != 1:
                mixed *= _signed(factor, width)
        return mixed

    def _two(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return uninitialized memory for two tensors of this shape."""
        size, room = torch.Size(shape).numel(), self._room.get((device, dtype))
        if room is None or room.shape[1] < size:
            room = self._room[device, dtype] = torch.empty(2, size, dtype=dtype, device=device)
        return room[0, :size].view(shape), room[1, :size].view(shape)


def _places(part: Box, shape: Sequence[int], of: _Hash, device: torch.device) -> list[Tensor]:
    """Return one tensor per dim. They broadcast. Their sum is of.index times the flat index in the global tensor."""
    found, stride = [], 1
    for dim in reversed(range(len(part.shape))):
        start, length = part.start[dim], part.shape[dim]
        along = torch.arange(start, start + length, dtype=torch.int64, device=device)
        along *= _signed(stride * of.index, 64)
        # The cast drops the higher bits, which computes mod 2^32.
        found.append(along.to(of.dtype).view([length if d == dim else 1 for d in range(len(part.shape))]))
        stride *= shape[dim]
    return found


def _chunk(device: torch.device) -> int:
    return _CHUNK if accelerator().holds(device) else _CPU_CHUNK


def _signed(number: int, width: int) -> int:
    """Return the signed integer of `width` bits that equals `number` mod 2^width."""
    return (number + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
