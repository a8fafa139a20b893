"""What ranks tell each other before a switch, in few bytes: small tensors as numbers, the whole compressed."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["packed", "told", "unpacked"]


class _Scalar(NamedTuple):
    value: Any
    dtype: torch.dtype


def told(own: Any, *, world_size: int) -> list[Any]:
    """What every rank tells, by rank. Collective."""
    if world_size == 1:
        return [own]
    parcels: list[bytes] = [b""] * world_size
    dist.all_gather_object(parcels, zlib.compress(pickle.dumps(own), level=1))
    return [pickle.loads(zlib.decompress(parcel)) for parcel in parcels]


def packed(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`numbers` (see holdings.scalars) with tensors of no dim as plain values: a pickled one is half a kilobyte."""
    return {
        name: {
            key: _Scalar(value.item(), value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else value
            for key, value in values.items()
        }
        for name, values in numbers.items()
    }


def unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one parameter, as they were."""
    return {
        key: torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Scalar) else value
        for key, value in values.items()
    }
