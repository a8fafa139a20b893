"""A checksum of a batch as the loader of a user's own loop gives it, by which the batch is known when it is read again.

What such a loop makes of its batches is its own matter: they need not be what `job.backward` takes.
"""

from __future__ import annotations

import dataclasses
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nbkit.rank.data.batch import Shard

_PLAIN = (str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device)


class NoChecksum(Exception):
    """Of a batch that holds what is named."""


def checksum(batch: Any) -> int:
    """Of what is in it: of a tensor or an array its shape, and the first and the last row.

    Raises NoChecksum where it holds anything but tensors of the host, arrays, numbers and texts, in containers and
    dataclasses.
    """
    found = 0
    try:
        for part in _parts(batch):
            found = zlib.crc32(part, found)
    except RecursionError:
        raise NoChecksum(f"a {type(batch).__name__} that holds itself") from None
    return found


def _parts(value: Any) -> Iterator[bytes]:
    kind = type(value)
    yield kind.__name__.encode()
    if isinstance(value, Tensor):
        yield from _ends(value)
    elif kind in _PLAIN:
        yield repr(value).encode("utf-8", "surrogatepass")
    elif isinstance(value, Mapping):
        yield from _parts(list(value.keys()))
        yield from _parts(list(value.values()))
    elif isinstance(value, tuple | list | deque):
        yield str(len(value)).encode()
        if all(type(each) in _PLAIN for each in value):
            yield repr(list(value)).encode("utf-8", "surrogatepass")
            return
        for each in value:
            yield from _parts(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Shard):  # which is another one on each rank
        yield from _parts([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject:
            yield from _parts(value.tolist())
            return
        yield f"{value.shape} {value.dtype}".encode()
        for end in (value[:1], value[-1:]) if value.ndim else (value,):
            yield end.tobytes()
    else:
        raise NoChecksum(f"a {kind.__name__}")


def _ends(tensor: Tensor) -> Iterator[bytes]:
    if tensor.device.type != "cpu":
        raise NoChecksum(f"a tensor on {tensor.device.type}, which is not waited for")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NoChecksum(f"a tensor of layout {tensor.layout}")
    yield f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    for end in (tensor[:1], tensor[-1:]) if tensor.ndim else (tensor,):
        yield end.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
