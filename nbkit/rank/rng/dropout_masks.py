"""Dropout masks and random bits that are a function of a key, the sample, and the place within the sample.

Every bit is a hash of coordinates, computed in 32-bit integers with wraparound. So it is the same on every device, for
every split of the tensor, and for every division into micro-batches. The hash is `lowbias32` of Chris Wellons' hash
prospector (https://nullprogram.com/blog/2018/07/31/). Keys are mixed by splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.rng.draw_plan import KINDS, place_of, runs_of
from nbkit.tensor_layout import count

_WORD = (1 << 64) - 1
_FIRST, _SECOND, _GOLDEN = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x9E3779B9 - (1 << 32)
_CHUNK = 1 << 20

# number of dims -> the kind of each dim. The first dim is samples.
_LAYOUTS: dict[int, tuple[str, ...]] = {
    2: ("", "feature"),
    3: ("", "sequence", "feature"),
    4: ("", "head", "sequence", ""),
}


def key_of(*parts: int) -> int:
    """Return 64 bits that depend on all `parts` and on their order."""
    key = 0
    for part in parts:
        key = (key + (part & _WORD) * 0xD6E8FEB86659FD93 + 0x9E3779B97F4A7C15) & _WORD
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _WORD
        key ^= key >> 31
    return key


def coordinates(shape: Sequence[int], rows: Tensor, *, sequence_first: bool = False) -> list[Tensor]:
    """Return the coordinates of a tensor of `shape` within the whole tensor: a vector of int32 for each dim.

    rows: int64 ids of the samples along dim 0 (with `sequence_first`, along dim 1 of three dims). If dim 0 is a
    multiple of the number of samples, it counts as two dims: (samples, heads) in a tensor of three dims, (samples,
    positions) in a tensor of two dims. Along positions, heads and features, coordinates begin at the start of the
    `extent`.
    Raises TrainingError if dim 0 is not a multiple of the number of samples, or if a part is longer than its whole.
    """
    shape, num = list(shape), rows.shape[0]
    if sequence_first and len(shape) == 3 and shape[1] == num:
        return [_along("sequence", shape[0], rows), rows.to(torch.int32), _along("feature", shape[2], rows)]
    if not shape or num == 0 or shape[0] % num or not shape[0]:
        raise TrainingError(
            "The model applies dropout to a tensor whose dim 0 is not the sample, so the mask would depend on the "
            "strategy.",
            numbers=f"shape {tuple(shape)}, in a micro-batch of {num} samples",
            hint="expand it to (samples, ...) before the dropout; or batch_first=True",
        )
    # If a part has only one head, the shape does not show that dim 0 is (samples, heads).
    if len(shape) <= 3 and (shape[0] != num or (len(shape) == 3 and place_of("head"))):
        shape = [num, shape[0] // num, *shape[1:]]
    layout = _LAYOUTS.get(len(shape), ("",) * len(shape))
    if len(shape) not in _LAYOUTS and any(place_of(kind) for kind in KINDS):
        raise TrainingError(
            "The model applies dropout to a part of a tensor, and nbkit cannot find which dim was divided.",
            numbers=f"{len(shape)} dims; nbkit knows (B, D), (B, T, D) and (B, H, T, S)",
            hint="apply dropout before or after the reshape; or a strategy without tp and cp",
        )
    first = rows if shape[0] == num else _folded(rows, shape[0] // num)
    return [first.to(torch.int32), *(_along(kind, n, rows) for kind, n in zip(layout[1:], shape[1:], strict=True))]


def _folded(rows: Tensor, fold: int) -> Tensor:
    """Return ids for a dim of (samples x fold) elements."""
    return (rows[:, None] * fold + torch.arange(fold, device=rows.device)).flatten()


def _along(kind: str, num: int, like: Tensor) -> Tensor:
    runs = runs_of(kind, num)
    if (held := count(runs)) < num:
        start, total = place_of(kind) or (0, num)
        raise TrainingError(
            f"The model applies dropout to a tensor that is larger than its part of the {kind}.",
            numbers=f"{num} elements from {start} on, of {total}; the part has {held}",
            hint="a strategy has gathered the tensor without saying so; please report this",
        )
    places = [torch.arange(start, stop, dtype=torch.int32, device=like.device) for start, stop in runs]
    return places[0] if len(places) == 1 else torch.cat(places)


@torch.no_grad()
def dropped(key: int, places: Sequence[Tensor], p: float) -> Tensor:
    """Return a bool mask that is True with probability p. It has a dim for each coordinate vector in `places`.

    An element depends only on `key` (64 bits) and on its coordinates. Besides the mask, this takes a few MB of memory.
    """
    threshold = min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    if accelerator().runs_triton(places[0]) and (kernel := _kernel()) is not None:
        made: Tensor | None = kernel((_signed(key), _signed(key >> 32)), places, threshold)
        if made is not None:
            return made
    mask, chunks = _hashed(key, places, torch.bool)
    for bits, part in chunks:
        torch.lt(_mix(bits, whole=False), threshold, out=part)
    return mask.view([place.shape[0] for place in places])


@cache
def _kernel() -> Callable[..., Tensor | None] | None:
    """Return mask_kernel.dropped; None without Triton, or without a compiler for it."""
    try:
        from nbkit.rank.rng import mask_kernel
    except ImportError:
        return None
    place = torch.zeros(1, dtype=torch.int32, device=accelerator().device(accelerator().kind))
    try:
        mask_kernel.dropped((0, 0), [place], 0)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(
            f"Triton cannot make dropout masks here, so nbkit uses many kernels for each mask: {said}", stacklevel=2
        )
        return None
    return mask_kernel.dropped


@torch.no_grad()
def random_bits(key: int, places: Sequence[Tensor]) -> Tensor:
    """Return 32 random bits for each element, as int64 >= 0. They are the bits of `dropped`; places: see there."""
    found, chunks = _hashed(key, places, torch.int64)
    for bits, part in chunks:
        part.copy_(_mix(bits)).bitwise_and_(0xFFFFFFFF)
    return found.view([place.shape[0] for place in places])


def _hashed(key: int, places: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    """Return an empty matrix, and pairs (bits that need one more mix, the rows of the matrix to write them to)."""
    low, high = _signed(key), _signed(key >> 32)
    salted = [_mix(place * _GOLDEN + (high ^ (dim * 0x2545F491 & 0x7FFFFFFF))) for dim, place in enumerate(places)]
    lines = _mix(salted[0] ^ low) if len(salted) > 1 else salted[0].new_full((1,), low)
    for place in salted[1:-1]:
        lines = _mix(lines[:, None] ^ place).flatten()
    last = salted[-1]
    made = torch.empty(lines.shape[0], last.shape[0], dtype=dtype, device=last.device)
    step = max(1, (_CHUNK << 6 if accelerator().holds(last) else _CHUNK) // max(1, last.shape[0]))
    starts = range(0, lines.shape[0], step)
    return made, ((lines[start : start + step, None] ^ last, made[start : start + step]) for start in starts)


def _mix(x: Tensor, *, whole: bool = True) -> Tensor:
    """Apply lowbias32 in place. whole=False skips the last shift, which does not change the upper 16 bits."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)) if whole else x


def _signed(value: int) -> int:
    """Return the low 32 bits as an int32."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
