"""Random numbers of one draw that are a function of its key and of the place of each element: see dropout_masks.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nbkit.rank.rng.dropout_masks import coordinates, key_of, random_bits


class KeyedNumbers:
    """begin: shape -> (key, whether it is one draw for the whole batch). rows: ids of the samples along dim 0."""

    def __init__(self, begin: Callable[[Sequence[int]], tuple[int, bool]], rows: Tensor) -> None:
        self._begin, self._rows = begin, rows

    def uniform(self, like: Tensor) -> Tensor:
        """From [0, 1): as many numbers as the dtype of `like` tells apart."""
        key, places = self._draw(like)
        return _uniform(key, places, like.dtype).view(like.shape)

    def normal(self, like: Tensor) -> Tensor:
        """Of mean 0 and variance 1, by the formula of Box and Muller (1958)."""
        key, places = self._draw(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        radius = torch.log1p(-_uniform(key_of(key, 1), places, wide)).mul_(-2).sqrt_()
        angle = _uniform(key_of(key, 2), places, wide).mul_(2 * math.pi)
        return radius.mul_(angle.cos_()).view(like.shape)

    def integers(self, like: Tensor, low: int, high: int) -> Tensor:
        """From [low, high), int64, for ranges below 2^31."""
        key, places = self._draw(like)
        return (random_bits(key, places) * (high - low) >> 32).add_(low).view(like.shape)

    def _draw(self, like: Tensor) -> tuple[int, list[Tensor]]:
        shape, rows = tuple(like.shape), self._rows.to(like.device)
        key, shared = self._begin(shape)
        if shared:
            shape, rows = (1, *shape), rows.new_tensor([-1])
        places = coordinates(shape, rows)
        # What is broadcast over positions, heads or features is the same for each part of them.
        return key, [place if i == 0 or len(place) > 1 else place * 0 for i, place in enumerate(places)]


def _uniform(key: int, places: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    bits = random_bits(key, places)
    if dtype == torch.float64:
        return (bits << 21 | random_bits(key_of(key, 3), places) >> 11).double().mul_(2.0**-53)
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    return (bits >> (32 - digits)).float().mul_(2.0**-digits).to(dtype)
