"""Computes the masks of dropout_masks.py, bit for bit, in one Triton kernel instead of about eighty kernels of torch.

With torch's kernels, dropout added 2,000 kernel launches to a step of a GPT with 125 M parameters on an H200, and the
step took twice as long. Import this module only if Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST_DIMS = 4
_WORDS = ["low", "high", "threshold"]
"""The arguments that differ in each draw. The kernel must not be specialized for their values."""


def dropped(key: tuple[int, int], places: Sequence[Tensor], threshold: int) -> Tensor | None:
    """Return the mask of dropout_masks.dropped, for `places` on a device; None for too many dims or elements.

    key: low and high half of the key, as int32. threshold: elements whose bits are below this int32 are dropped.
    """
    sizes = [len(place) for place in places]
    num = torch.Size(sizes).numel()
    if not 0 < num < 1 << 31 or len(sizes) > _MOST_DIMS or not all(place.is_contiguous() for place in places):
        return None
    mask = torch.empty(sizes, dtype=torch.bool, device=places[0].device)
    # With fewer dims, the kernel ignores the added vectors.
    vectors = [*places, *[places[0]] * (_MOST_DIMS - len(places))]
    lengths = [*sizes[1:], 1, 1, 1][: _MOST_DIMS - 1]
    _masked[(-(-num // _BLOCK),)](mask, *vectors, *lengths, num, *key, threshold, DIMS=len(sizes), BLOCK=_BLOCK)
    return mask


@triton.jit
def _mixed(x, WHOLE: tl.constexpr):
    x ^= x >> 16
    x *= tl.full((), 0x7FEB352D, tl.uint32)
    x ^= x >> 15
    x *= tl.full((), 0x846CA68B, tl.uint32)
    if WHOLE:
        x ^= x >> 16
    return x


@triton.jit
def _salted(places, at, inside, high, DIM: tl.constexpr):
    place = tl.load(places + at, mask=inside, other=0).to(tl.uint32)
    salt = high ^ tl.full((), (DIM * 0x2545F491) & 0x7FFFFFFF, tl.uint32)
    return _mixed(place * tl.full((), 0x9E3779B9, tl.uint32) + salt, True)


@triton.jit(do_not_specialize=_WORDS)
def _masked(
    mask,
    first,
    second,
    third,
    fourth,
    num2,
    num3,
    num4,
    num,
    low,
    high,
    threshold,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    low, high = low.to(tl.uint32), high.to(tl.uint32)
    if DIMS == 1:
        bits = _salted(first, at, inside, high, 0) ^ low
    elif DIMS == 2:
        bits = _mixed(_salted(first, at // num2, inside, high, 0) ^ low, True)
        bits ^= _salted(second, at % num2, inside, high, 1)
    elif DIMS == 3:
        bits = _mixed(_salted(first, at // (num2 * num3), inside, high, 0) ^ low, True)
        bits = _mixed(bits ^ _salted(second, at // num3 % num2, inside, high, 1), True)
        bits ^= _salted(third, at % num3, inside, high, 2)
    else:
        bits = _mixed(_salted(first, at // (num2 * num3 * num4), inside, high, 0) ^ low, True)
        bits = _mixed(bits ^ _salted(second, at // (num3 * num4) % num2, inside, high, 1), True)
        bits = _mixed(bits ^ _salted(third, at // num4 % num3, inside, high, 2), True)
        bits ^= _salted(fourth, at % num4, inside, high, 3)
    tl.store(mask + at, _mixed(bits, False).to(tl.int32, bitcast=True) < threshold, mask=inside)
