"""Finds the elements of a tensor in the archive that torch.save made of it: bytes among others in a larger file."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import BinaryIO

_NAME = "archive/data/0"
_LENGTHS = 26  # where in an entry the lengths of its name and of its extra field stand, two bytes each
_HEADER = 30  # bytes of an entry before them


def elements_in(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """(where in `file` the elements begin, their CRC-32). The archive is `length` bytes from `start` on."""
    entry = zipfile.ZipFile(_Part(file, start, length)).getinfo(_NAME)
    file.seek(start + entry.header_offset + _LENGTHS)
    name, extra = struct.unpack("<2H", file.read(4))
    return start + entry.header_offset + _HEADER + name + extra, entry.CRC


class _Part(io.RawIOBase):
    """A part of a file, as a file: zipfile finds the directory at the end of what it is given."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found
