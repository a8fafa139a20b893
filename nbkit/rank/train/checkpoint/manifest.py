"""Read and write the manifest of a checkpoint, as JSON: the offsets of all tensors, and all values that are no tensors.

The manifest is in `.metadata`, after the part that torch's tools read. That part is a pickle, and reading a pickle may
call any function. The headers of the tensors in the data files are pickles too. nbkit reads none of them. The manifest
has the file and offset of each part of each tensor. Its footer and a checksum for each part detect any change.

`encoded` and `decoded` convert plain values to JSON and back, with their exact types and bits: numbers, text, lists,
tuples, dicts, sets and small tensors. JSON does not name classes, so reading it can build nothing else, whoever wrote
it. A type that JSON does not have becomes an object with one key, the name of the type.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import os
import re
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbkit.planner.exchange import within
from nbkit.tensor_layout import Box

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    )
}  # fmt: skip
"""Every dtype that a checkpoint may hold, by name."""

MOST_CHARACTERS = 16 << 20
"""The most characters of JSON that user objects may put into a checkpoint."""

_AS_THEY_ARE = (type(None), bool, int, float, str)
_MOST_DIMS = 64


def name_of(dtype: torch.dtype) -> str:
    """Return the key of `dtype` in DTYPES. Raises TypeError for any other dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a tensor of {dtype} cannot be written to a checkpoint")
    return name


def viewed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a uint8 tensor as elements of `dtype`. For bool, any byte other than 0 is true."""
    return bits.ne(0) if dtype == torch.bool else bits.view(dtype)


def encoded(value: Any) -> str:
    """Return `value` as one line of JSON. numpy scalars become Python numbers, and numpy arrays become tensors.

    Raises TypeError for other types.
    """
    return json.dumps(_tagged(value), separators=(",", ":"))


def writable(value: Any) -> Any:
    """Return the user's `value` if it can be saved, otherwise None.

    A checkpoint can contain plain values of at most MOST_CHARACTERS of JSON.
    """
    try:
        return value if len(encoded(value)) <= MOST_CHARACTERS else None
    except TypeError:
        return None


def decoded(text: str | bytes) -> Any:
    """Return the value that `encoded` wrote as `text`.

    Raises ValueError, TypeError, KeyError or RecursionError for other text.
    """
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)) in _READERS):
            # A fast path: all records of a long history pass here.
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
        raise ValueError(f"a tensor of {name} and shape {shape} does not have {len(bits)} bytes")
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


OURS = re.compile(r"[0-9a-f]{12}_\d{1,9}_\d{1,9}\.distcp")
"""Names of data files."""

_FORMAT = 3
_FOOTER = struct.Struct("<Q32s8s")  # bytes of the manifest, sha256 of everything before the footer, magic
_MAGIC = b"nbkit ck"
_BLOCK = 1 << 20
_LARGEST = 1 << 62
_MOST_EPOCHS = 1 << 32  # so that a seed plus an epoch is a valid seed


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor. file, start: its elements, row by row. crc: their CRC-32."""

    box: Box
    file: str
    start: int
    crc: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def size_of(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk."""
        return chunk.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    tensors: key -> tensor. files: name -> size in bytes. about: see checkpoint.take. digest: the SHA-256 of the file
    without its footer, as hex.
    """

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, int]
    about: dict[str, Any]
    digest: str


def written(head: bytes, tensors: Mapping[str, SavedTensor], files: Mapping[str, int], about: str) -> bytes:
    """Return the content of `.metadata`. head: torch's part. files: name -> size. about: a result of `encoded`."""
    number = {name: index for index, name in enumerate(files)}
    rows = [
        [
            key,
            name_of(kept.dtype),
            kept.shape,
            [[number[c.file], c.start, c.crc, *c.box.start, *c.box.shape] for c in kept.chunks],
        ]
        for key, kept in tensors.items()
    ]
    parts = [json.dumps(each, separators=(",", ":")) for each in (_FORMAT, sys.byteorder, list(files.items()), rows)]
    text = f"[{','.join(parts)},{about}]".encode()
    return head + text + _FOOTER.pack(len(text), hashlib.sha256(head + text).digest(), _MAGIC)


def read(path: Path) -> Manifest:
    """Read the manifest at the end of the file `path`. Raises OSError, or any Exception if it is missing or damaged."""
    with opened(path) as file:
        size = file.seek(0, os.SEEK_END) - _FOOTER.size
        file.seek(max(size, 0))
        length, digest, magic = _FOOTER.unpack(file.read()) if size >= 0 else (0, b"", b"")
        if magic != _MAGIC:
            raise ValueError(f"the end of its {path.name} is missing, or this release did not write it")
        found = hashlib.sha256()
        file.seek(0)
        for at in range(0, size, _BLOCK):
            found.update(file.read(min(_BLOCK, size - at)))
        if found.digest() != digest or length > size:
            raise ValueError(f"its {path.name} is damaged: {size} bytes have a wrong checksum")
        file.seek(size - length)
        values = decoded(file.read(length))
    if not isinstance(values, list) or values[:1] != [_FORMAT]:
        written_in = values[0] if isinstance(values, list) and values else values
        raise ValueError(
            f"it is of format {written_in!r:.20}, and this release reads {_FORMAT}; with the release that saved it: "
            "nbkit checkpoint export DIR FILE"
        )
    _, order, files, rows, about = values
    if order != sys.byteorder:
        raise ValueError(f"written on a {order!r:.20}-endian machine, this one is {sys.byteorder}-endian")
    for name, size in files:
        if type(name) is not str or not OURS.fullmatch(name) or not _counts([size]):
            raise ValueError(f"it names a data file {name!r:.80}, which no checkpoint has")
    names = [name for name, _ in files]
    tensors = {key: _kept(key, DTYPES[name], shape, chunks, names) for key, name, shape, chunks in rows}
    if len(tensors) != len(rows) or not all(type(key) is str for key in tensors):
        raise ValueError("it names a tensor twice, or without a name")
    _check(about, tensors)
    return Manifest(tensors, dict(files), about, digest.hex())


def opened(path: Path) -> io.BufferedReader:
    """Open the file at `path` for reading.

    Raises OSError, or ValueError for a link, pipe, folder or device.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path.name} is a symbolic link") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError(f"{path.name} is not a file of bytes")
    return os.fdopen(number, "rb")


def _kept(key: str, dtype: torch.dtype, shape: list[int], rows: list[list[int]], files: list[str]) -> SavedTensor:
    dims, chunks = len(shape), []
    if not _counts(shape):
        raise ValueError(f"{key!r:.80} has an invalid shape {shape!r:.80}")
    for row in rows:
        number, start, crc = row[:3]
        box = Box(tuple(row[3 : 3 + dims]), tuple(row[3 + dims :]))
        if not _counts(row) or number >= len(files) or not within(box, Box((0,) * dims, tuple(shape))):
            raise ValueError(f"it names an invalid part of {key!r:.80}: {row!r:.80}")
        chunks.append(Chunk(box, files[number], start, crc))
    if (held := sum(chunk.box.numel for chunk in chunks)) != prod(shape):
        raise ValueError(f"it holds only {held} of {prod(shape)} elements of {key!r:.80}")
    return SavedTensor(dtype, tuple(shape), tuple(chunks))


def _check(about: Any, tensors: Mapping[str, SavedTensor]) -> None:
    """Raise ValueError if `about` has another form than in checkpoint.take, or if a tensor that it names is missing."""
    for field, fits in _FIELDS.items():
        try:
            good = fits(about[field])
        except (TypeError, ValueError, KeyError, AttributeError):
            good = False
        if not good:
            raise ValueError(f"its entry {field!r} is missing or invalid")
    for name, key, shape in about["names"]:
        kept = tensors.get(key)
        if prod(shape) if kept is None else kept.shape != tuple(shape):
            raise ValueError(f"{name!r:.80} of shape {shape!r:.80} is not in it")


def _counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < _LARGEST for value in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _are_names(value: Any) -> bool:
    return all(type(name) is str and type(key) is str and _counts(shape) for name, key, shape in value)


def _is_position(value: Any) -> bool:
    where = value["epoch"], value["offset"]
    return _counts(where) and where[0] < _MOST_EPOCHS and all(map(_is_number, value["base_lr"]))


def _is_history(value: Any) -> bool:
    return all(_is_named(record) and _counts([record["step"]]) and _is_number(record["loss"]) for record in value)


def _is_precision(value: Any) -> bool:
    return _is_named(value) and (value["scale"] is None or (value["scale"] > 0 and _is_number(value["finite"])))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "names": _are_names,
    "groups": lambda value: all(type(name) is str for names in value for name in names),
    "settings": lambda value: all(_is_named(group) and _is_number(group.get("lr", 0)) for group in value),
    "numbers": lambda value: _is_named(value) and all(_is_named(one) for one in value.values()),
    "step": lambda value: _counts([value]),
    "position": _is_position,
    "history": _is_history,
    "seed": lambda value: type(value) is int and -(1 << 63) <= value < (1 << 64) - _MOST_EPOCHS,
    "precision": _is_precision,
    "strategy": lambda value: type(value) is str,
}
