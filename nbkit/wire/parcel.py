"""Parcels: values that the notebook and a rank send each other, each in a file in shared memory.

A value is pickled with its buffers out of band (PEP 574), so an array of 100 MB is copied once, into the file. The
receiver maps the file copy-on-write, and builds the array on that memory without another copy. Tensors are sent as
arrays, so the notebook needs no torch to receive one. The file is unlinked as soon as it is mapped.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import struct
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from nbkit.wire.processes import Process, boot_id

_SHARED = Path("/dev/shm")
_ALIGN = 64
_SPARE = 16 << 20  # bytes of shared memory to leave for other processes
_ROUNDS = 100  # attempts to remove a folder while other processes write into it; then it stays
LIMIT_BYTES = 1 << 30
LEFT_AFTER = 600.0  # seconds; the pid may belong to another container that shares /dev/shm


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays. CUDA tensors go through the CPU."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if (
            torch is None
            or not isinstance(value, torch.Tensor)
            or type(value) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return NotImplemented
        tensor = value.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        try:
            array = tensor.numpy()
        except TypeError:  # numpy has no bfloat16 and float8 types: send the bits
            array = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).numpy()
        return _tensor, (array, name, value.requires_grad)


def _tensor(array: Any, dtype: str, requires_grad: bool) -> Any:
    """Return a tensor if torch is imported, else an array."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _without_torch(array, dtype)
    tensor = torch.from_numpy(array)
    if str(tensor.dtype) != f"torch.{dtype}":
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _without_torch(array: Any, dtype: str) -> Any:
    if dtype != "bfloat16":
        return array
    import numpy

    return (array.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)


def folder(size: int = 0) -> Path:
    """Return the folder for a parcel of `size` bytes.

    This is shared memory if there is enough of it (containers often have 64 MB), else the temporary folder.
    """
    if _SHARED.is_dir() and os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).free > size + _SPARE:
        return _SHARED
    return Path(tempfile.gettempdir())


def pack(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickle of `value` and its large buffers, uncopied. Raises what pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Packer(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), buffers


def size_of(packed: tuple[bytes, list[pickle.PickleBuffer]]) -> int:
    """Return the number of bytes to send."""
    return len(packed[0]) + sum(buffer.raw().nbytes for buffer in packed[1])


def reserve() -> str:
    """Return a new token. Parcels named `token/...` can be written until `discard(token)` is called."""
    token = _new_name()
    for place in _places():
        (place / token).mkdir(mode=0o700)
    return token


def write(packed: tuple[bytes, list[pickle.PickleBuffer]], name: str = "") -> str:
    """Write a packed value to a new private file. Return its path. The last reader unlinks it.

    Raises FileNotFoundError if `name` is under a token that was discarded.
    """
    head, buffers = packed
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    path = folder(size_of(packed)) / (name or _new_name())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb", buffering=0) as file:
            _write_all(file, struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts)))
            for part in parts:
                file.seek(-file.tell() % _ALIGN, os.SEEK_CUR)
                _write_all(file, part)
            file.truncate()
    except BaseException:
        path.unlink()
        raise
    return str(path)


def packed_bytes(packed: tuple[bytes, list[pickle.PickleBuffer]]) -> list[bytes]:
    """Return a packed value in the form for another host: the pickle, then its buffers."""
    head, buffers = packed
    return [head, *(bytes(buffer.raw()) for buffer in buffers)]


def unpack(parts: list[bytes]) -> Any:
    """Return the value from the result of `packed_bytes`. Its arrays are writable."""
    return pickle.loads(parts[0], buffers=[bytearray(part) for part in parts[1:]])


def discard(token: str) -> None:
    """Unlink the parcels under `token`. A rank that wants to write another one fails, since the folder is gone."""
    for place in _places():
        # If a parcel is created between listing and removing the folder, another round is needed.
        for _ in range(_ROUNDS):
            if not (place / token).exists():
                break
            shutil.rmtree(place / token, ignore_errors=True)


def remove_left() -> int:
    """Remove this user's parcels whose process has died before it could remove them. Return their number."""
    removed = 0
    # Do not use `_places`: it leaves out shared memory that is full, where cleaning is most useful.
    for path in (path for place in (_SHARED, Path(tempfile.gettempdir())) for path in place.glob("nbkit-*-*-*")):
        try:
            pid, started = map(int, path.name.split("-")[1:3])
            about = path.lstat()
        except (ValueError, OSError):
            continue
        old = time.time() - about.st_mtime > LEFT_AFTER
        if old and about.st_uid == os.getuid() and not Process(pid, started, boot_id()).is_alive():
            removed += 1
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return removed


def _new_name() -> str:
    """Return a name for a parcel of this process.

    It has the pid and the start time of the process, so that `remove_left` can see if the process still lives.
    """
    own = Process.of(os.getpid())
    return f"nbkit-{own.pid}-{own.started:.0f}-{uuid.uuid4().hex}"


def _places() -> set[Path]:
    return {folder(), Path(tempfile.gettempdir())}


def _write_all(file: Any, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[file.write(view) :]


def read(path: str, *, unlink: bool = True) -> Any:
    """Return the value in a parcel. Its arrays use the mapped file as memory, writable and private to this process."""
    with open(path, "rb") as file:
        if unlink:
            os.unlink(path)
        memory = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    at, parts = 8 * (count + 1), []
    for size in sizes:
        at += -at % _ALIGN
        parts.append(memory[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])
