"""Plain values as JSON and back, types and bits included: numbers, text, lists, tuples, dicts, small tensors.

JSON names no classes, so that reading it builds nothing but these, whoever wrote it. What JSON has no form for is an
object with one key that says which type it is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    )
}  # fmt: skip
"""Every dtype that a checkpoint may hold, by its name."""

MOST_CHARACTERS = 16 << 20
"""Of what somebody else's data says of itself."""

_AS_THEY_ARE = (type(None), bool, int, float, str)
_MOST_DIMS = 64


def name_of(dtype: torch.dtype) -> str:
    """Its key in DTYPES. Raises TypeError for one that is not there."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a tensor of {dtype} cannot be written to a checkpoint")
    return name


def viewed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements of `dtype`; any byte but 0 is true."""
    return bits.ne(0) if dtype == torch.bool else bits.view(dtype)


def encoded(value: Any) -> str:
    """`value` as one line of JSON. Numbers of numpy become Python's, arrays tensors. Raises TypeError for the rest."""
    return json.dumps(_tagged(value), separators=(",", ":"))


def writable(value: Any) -> Any:
    """`value`, which is not nbkit's own, if a checkpoint can hold it: plain values, at most MOST_CHARACTERS."""
    try:
        return value if len(encoded(value)) <= MOST_CHARACTERS else None
    except TypeError:
        return None


def decoded(text: str | bytes) -> Any:
    """What `encoded` was given. Raises ValueError, TypeError, KeyError or RecursionError for what it did not write."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)) in _READERS):
            # The records of a long history come by here.
            return {key: one if type(one) in _AS_THEY_ARE else _tagged(one) for key, one in value.items()}
        return {"dict": [[_tagged(key), _tagged(one)] for key, one in value.items()]}
    if isinstance(value, list):
        return [_tagged(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(one) for one in value]}
    if isinstance(value, set):
        return {"set": [_tagged(one) for one in value]}
    if isinstance(value, complex):
        return {"complex": [float(value.real), float(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _tagged(torch.as_tensor(value) if value.ndim else value.item())
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [name_of(value.dtype), list(value.shape), base64.b64encode(bits).decode()]}
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be written to a checkpoint")


def _untagged(found: dict[str, Any]) -> Any:
    if len(found) == 1:
        ((key, value),) = found.items()
        if (reader := _READERS.get(key)) is not None:
            return reader(value)
    return found


def _tensor(value: list[Any]) -> Tensor:
    name, shape, text = value
    bits = base64.b64decode(text, validate=True)
    known = all(type(length) is int and length >= 0 for length in shape) and len(shape) <= _MOST_DIMS
    if not known or prod(shape) * DTYPES[name].itemsize != len(bits):
        raise ValueError(f"a tensor of {name} and shape {shape} in {len(bits)} bytes")
    flat = torch.frombuffer(bytearray(bits), dtype=torch.uint8) if bits else torch.empty(0, dtype=torch.uint8)
    return viewed(flat, DTYPES[name]).reshape(shape).clone()


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "complex": lambda parts: complex(*parts),
    "dtype": DTYPES.__getitem__,
    "tensor": _tensor,
}
