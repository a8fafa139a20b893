"""Read and write a job's tensors in the format of torch.distributed.checkpoint.

The files of one directory hold boxes of global tensors. A save writes new data files beside those of the existing
checkpoint. Then a single rename replaces the old `.metadata`, which names the files, by a new one. Until that rename
the old checkpoint is valid, and after it the new one. Data files that `.metadata` does not name are leftovers; the next
save removes them.

torch.save makes an archive of each tensor, and several archives share one file. `elements_in` finds the elements in an
archive.

torch writes the files (`DcpWriter` is a FileSystemWriter), and its tools can read them. `DcpReader` does not use
torch's FileSystemReader, which runs the pickle in `.metadata`, follows links, and unpickles the head of each tensor.
`DcpReader` takes the offsets and checksums of the bytes from the manifest. It reads only these bytes, and each once.
With checksums for the chunks, torch's reader would read the bytes twice, and take 1.4 to 2.7 times the CPU time.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from nbkit.planner.exchange import within
from nbkit.rank.torch_private import StorageInfo
from nbkit.rank.train.checkpoint.manifest import OURS, Chunk, SavedTensor, opened, read, viewed, written
from nbkit.tensor_layout import Box, Layout

_NAME = "archive/data/0"
_LENGTHS = 26  # offset in a zip entry, where the lengths of its name and its extra field are, two bytes each
_HEADER = 30  # bytes of a zip entry before its name and its extra field


def elements_in(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Return (offset of the elements in `file`, their CRC-32). The archive has `length` bytes and begins at `start`."""
    entry = zipfile.ZipFile(_Part(file, start, length)).getinfo(_NAME)
    file.seek(start + entry.header_offset + _LENGTHS)
    name, extra = struct.unpack("<2H", file.read(4))
    return start + entry.header_offset + _HEADER + name + extra, entry.CRC


class _Part(io.RawIOBase):
    """A part of a file that behaves like a whole file. zipfile needs it: it looks for a directory at the file's end."""

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


_PATIENCE = 1.0  # seconds that the files of other hosts may take to become visible

State = Mapping[str, tuple[Tensor, Layout]]
"""The tensors that a rank holds: key -> (its part, the layout of that part)."""


class Saving(DefaultSavePlanner):
    """A planner that makes this rank write exactly `shares` (key -> boxes of the global tensor)."""

    def __init__(self, held: State, shares: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held, self._shares = held, shares

    def create_local_plan(self) -> SavePlan:
        self._parts: dict[tuple[str, torch.Size], Tensor] = {}
        items = []
        for key, boxes in self._shares.items():
            tensor, layout = self._held[key]
            for box in boxes:
                offset = torch.Size(box.start)
                self._parts[key, offset] = _seen(tensor, layout, box)
                data = TensorWriteData(
                    ChunkStorageMetadata(offset, torch.Size(box.shape)),
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(layout.shape),
                )
                items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        # The reader expects rows. Without `contiguous`, a tensor that is transposed in memory is written by columns.
        return self._parts[index.fqn, index.offset].contiguous()


@dataclass(frozen=True)
class _Files:
    """The prefix of the names of one rank's data files."""

    prefix: str


@dataclass
class _Placed(StorageInfo):  # type: ignore[misc]
    """Storage info with the offset of the elements in the file, and their CRC-32."""

    start: int = 0
    crc: int = 0


@dataclass(frozen=True)
class WrittenParts:
    """The parts that one rank has written.

    plan: the SavePlan of torch. results: the file and offset of each part. files: the names of its files, at least one.
    folder: the directory of the files, as this rank sees it.
    """

    plan: SavePlan
    results: list[WriteResult]
    files: tuple[str, ...]
    folder: str


class DcpWriter(FileSystemWriter):
    """Writes a checkpoint beside the existing one, and replaces the existing one at the end."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._prefix = f"{secrets.token_hex(6)}_{rank}_"

    def write(self, planner: Saving) -> WrittenParts:
        """Write this rank's data files. Sends nothing; from any thread."""
        self.fs.mkdir(self.path)
        plan = replace(planner.create_local_plan(), storage_data=_Files(self._prefix))
        before = get_crc32_options()
        set_crc32_options(True)
        try:
            results = self.write_data(plan, planner).wait()
        finally:
            set_crc32_options(before)
        files = {result.storage_data.relative_path for result in results}
        if not files:  # other ranks write everything, but rank 0 needs a file of each rank for `unseen`
            files = {f"{self._prefix}0.distcp"}
            Path(self.path, *files).touch()
        return WrittenParts(
            SavePlan(plan.items), _placed(Path(self.path), results), tuple(sorted(files)), str(self.path)
        )

    def unseen(self, parts: Sequence[WrittenParts]) -> list[int]:
        """Return the ranks whose files this rank does not see, although they were written. Waits for them a moment.

        The file names are new, so no file system has cached that they do not exist.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            missing = [
                rank
                for rank, part in enumerate(parts)
                if not all(Path(self.path, name).exists() for name in part.files)
            ]
            if not missing or time.monotonic() > until:
                return missing
            time.sleep(0.1)

    def put_in_place(self, parts: Sequence[WrittenParts], about: str) -> None:
        """Make the new checkpoint the current one. Called on one rank, when all data is on disk.

        about: everything that is not a tensor, as `encoded` returns it.
        """
        folder = Path(self.path)
        _, metadata = create_default_global_save_plan([part.plan for part in parts])
        places = {result.index: result.storage_data for part in parts for result in part.results}
        metadata.storage_data = {
            index: StorageInfo(info.relative_path, info.offset, info.length) for index, info in places.items()
        }
        metadata.planner_data = {}
        sizes: dict[str, int] = {}
        for info in places.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        content = written(pickle.dumps(metadata), _tensors(metadata, places), sizes, about)
        beside = folder / ".metadata.tmp"
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:  # "x": never write through an existing link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / ".metadata")
        _sync(folder)
        with suppress(OSError):  # the checkpoint is complete already
            for file_path in folder.iterdir():
                if OURS.fullmatch(file_path.name) and file_path.name not in sizes:
                    file_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the files that this rank wrote in a failed save."""
        folder = Path(self.path)
        with suppress(OSError):
            for file_path in folder.glob(f"{self._prefix}*.distcp"):
                file_path.unlink(missing_ok=True)
            (folder / ".metadata.tmp").unlink(missing_ok=True)
            folder.rmdir()  # only if nothing else is in it


def _placed(folder: Path, results: list[WriteResult]) -> list[WriteResult]:
    """Return `results` with the offset of the elements, which are inside an archive for each tensor."""
    found = []
    with ExitStack() as stack:
        names = {result.storage_data.relative_path for result in results}
        files = {name: stack.enter_context((folder / name).open("rb")) for name in names}
        for result in results:
            info = result.storage_data
            start, crc = elements_in(files[info.relative_path], info.offset, info.length)
            place = _Placed(info.relative_path, info.offset, info.length, start=start, crc=crc)
            found.append(replace(result, storage_data=place))
    return found


def _tensors(metadata: Metadata, places: Mapping[MetadataIndex, _Placed]) -> dict[str, SavedTensor]:
    found = {}
    for key, kept in metadata.state_dict_metadata.items():
        assert isinstance(kept, TensorStorageMetadata)
        chunks = []
        for chunk in kept.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            chunks.append(Chunk(box, place.relative_path, place.start, place.crc))
        found[key] = SavedTensor(kept.properties.dtype, tuple(kept.size), tuple(chunks))
    return found


class DcpReader:
    """An open checkpoint. Raises OSError or another Exception if `path` is none, or if a data file is incomplete.

    tensors, about: see Manifest. digest: equal on ranks that see the same checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = read(path / ".metadata")
        self.tensors, self.about, self.digest = found.tensors, found.about, found.digest
        parts: dict[str, list[tuple[int, int]]] = {name: [(0, 0)] for name in found.files}
        for kept in self.tensors.values():
            for chunk in kept.chunks:
                parts[chunk.file].append((chunk.start, chunk.start + kept.size_of(chunk)))
        for name, ranges in parts.items():
            with opened(path / name) as file:
                size = os.fstat(file.fileno()).st_size
            ranges.sort()
            if size != found.files[name]:
                raise ValueError(f"{name} has {size} bytes of {found.files[name]}")
            if (end := max(stop for _, stop in ranges)) > size:
                raise ValueError(f"a part of {name} ends at {end}, and the file at {size}")
            if any(start < stop for (start, _), (_, stop) in zip(ranges[1:], ranges, strict=False)):
                raise ValueError(f"the same bytes of {name} belong to two parts")

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Key -> dtype of every tensor in the checkpoint."""
        return {key: kept.dtype for key, kept in self.tensors.items()}

    def reads(self, key: str, layout: Layout) -> list[tuple[Chunk, Box, Box]]:
        """Return the reads that fill `layout` of tensor `key`: (chunk, box in the global tensor, box in the local one).

        Raises ValueError if the checkpoint does not contain all elements of `layout`.
        """
        if not layout.pieces:
            return []
        kept = self.tensors.get(key)
        if kept is None or kept.shape != layout.shape:
            raise ValueError(f"{key} of shape {layout.shape} is not in it")
        found = []
        for here, there in layout.pieces:
            for chunk in kept.chunks:
                if (common := chunk.box.meet(there)) is not None:
                    found.append((chunk, common, common.moved(there.start, here.start)))
        held, wanted = sum(common.numel for _, common, _ in found), sum(there.numel for _, there in layout.pieces)
        if held != wanted:
            raise ValueError(f"it holds only {held} of the {wanted} elements of {key} that are needed")
        return found

    def verify(self, wanted: Mapping[str, Layout]) -> None:
        """Read all chunks that `wanted` (key -> layout) needs. Raises ValueError if one is missing or damaged."""
        found: dict[tuple[str, int], tuple[SavedTensor, Chunk]] = {}
        for key, layout in wanted.items():
            found |= {(chunk.file, chunk.start): (self.tensors[key], chunk) for chunk, _, _ in self.reads(key, layout)}
        with self.elements() as elements:
            for place in sorted(found):
                elements(*found[place])

    @contextmanager
    def elements(self) -> Iterator[Callable[[SavedTensor, Chunk], Tensor]]:
        """Yield a function that reads a chunk. It raises ValueError if the bytes have another checksum."""
        with ExitStack() as files:
            by_name: dict[str, io.BufferedReader] = {}

            def read_chunk(kept: SavedTensor, chunk: Chunk) -> Tensor:
                if (file := by_name.get(chunk.file)) is None:
                    file = by_name[chunk.file] = files.enter_context(opened(self.path / chunk.file))
                bits = torch.empty(kept.size_of(chunk), dtype=torch.uint8)
                into = bits.numpy().data
                file.seek(chunk.start)
                if file.readinto(into) != len(bits) or zlib.crc32(into) != chunk.crc:
                    where = f"{len(bits)} bytes from {chunk.start} on"
                    raise ValueError(f"{chunk.file} is damaged: {where} have a wrong checksum")
                return viewed(bits, kept.dtype).reshape(chunk.box.shape)

            yield read_chunk


@torch.no_grad()
def fill(reader: DcpReader, target: State) -> None:
    """Fill the tensors of `target` from disk, one saved box after another. Not collective."""
    wanted: dict[tuple[str, int], tuple[SavedTensor, Chunk, list[tuple[Tensor, Box]]]] = {}
    for key, (tensor, layout) in target.items():
        for chunk, there, here in reader.reads(key, layout):
            _, _, places = wanted.setdefault((chunk.file, chunk.start), (reader.tensors[key], chunk, []))
            places.append((tensor[here.slices], there.moved(chunk.box.start, (0,) * len(layout.shape))))
    with reader.elements() as elements:
        for place in sorted(wanted):
            kept, chunk, places = wanted[place]
            found = elements(kept, chunk)
            for tensor, box in places:
                tensor.copy_(found[box.slices])


def _seen(tensor: Tensor, layout: Layout, box: Box) -> Tensor:
    """Return `box` of the global tensor, as a view of the local one."""
    here, there = next(piece for piece in layout.pieces if within(box, piece[1]))
    return tensor.detach()[box.moved(there.start, here.start).slices]


def _sync(folder: Path) -> None:
    """Flush the rename in `folder` to disk."""
    with suppress(OSError), io.FileIO(os.open(folder, os.O_RDONLY)) as file:
        os.fsync(file.fileno())
