"""A job's tensors as torch.distributed.checkpoint keeps them: boxes of global tensors, in the files of one directory.

A save writes new data files beside those of the checkpoint that is there, then puts a new `.metadata`, which names
the files, in the place of the old one by a single rename. Up to that rename the old checkpoint stands, from it on the
new one; no moment is without. Data files that no `.metadata` names are leftovers, and the next save removes them.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nbkit.layout import Box, Layout
from nbkit.planner.cover import within

__all__ = ["Filling", "Reader", "Saving", "Writer", "fill"]

State = Mapping[str, tuple[Tensor, Layout]]
"""What a rank holds: key -> (its part, which part that is)."""

_OURS = re.compile(r"[0-9a-f]{12}_\d+_\d+\.distcp")


class Saving(DefaultSavePlanner):
    """This rank writes `shares` (key -> boxes of the global tensor) of what it holds, and nothing else."""

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
        return self._parts[index.fqn, index.offset]


class Filling(DefaultLoadPlanner):
    """This rank fills the tensors of `target`, whatever boxes a checkpoint keeps them in."""

    def __init__(self, target: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._target = target

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self._parts: dict[tuple[str, torch.Size], Tensor] = {}
        items = []
        for key, (tensor, layout) in self._target.items():
            kept = self.metadata.state_dict_metadata.get(key)
            boxes = []
            for here, there in layout.pieces:
                boxes.append(ChunkStorageMetadata(torch.Size(there.start), torch.Size(there.shape)))
                self._parts[key, torch.Size(there.start)] = tensor[here.slices]
            if not boxes:
                continue
            if not isinstance(kept, TensorStorageMetadata) or tuple(kept.size) != layout.shape:
                raise ValueError(f"{key} of shape {layout.shape} is not in it")
            reads = create_read_items_for_chunk_list(key, kept, boxes)
            found, wanted = sum(read.lengths.numel() for read in reads), sum(there.numel for _, there in layout.pieces)
            if found != wanted:
                raise ValueError(f"of {key} it holds {found} elements of the {wanted} needed")
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[index.fqn, index.offset]


@dataclass(frozen=True)
class _Files:
    """How the names of one rank's data files begin."""

    prefix: str


class Writer(FileSystemWriter):
    """Writes beside what is there, and replaces it at the end. about: what `Reader.about` gives back; from rank 0."""

    def __init__(self, path: Path, about: bytes) -> None:
        super().__init__(path)
        self._about, self._prefix = about, ""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Torch's own would warn that it overwrites.
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save = secrets.token_hex(6)
        return [replace(plan, storage_data=_Files(f"{save}_{rank}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        self._prefix = plan.storage_data.prefix
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0, when all data is on the disk. Torch's own removes the old metadata before the new one is there."""
        folder = Path(self.path)
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.planner_data = {"nbkit": self._about}
        beside = folder / ".metadata.tmp"
        with beside.open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / ".metadata")
        _sync(folder)
        named = {info.relative_path for info in metadata.storage_data.values()}
        for file_path in folder.iterdir():
            if _OURS.fullmatch(file_path.name) and file_path.name not in named:
                file_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what this rank wrote in a save that did not come to its end."""
        folder = Path(self.path)
        with suppress(OSError):
            for file_path in folder.glob(f"{self._prefix}*.distcp") if self._prefix else ():
                file_path.unlink(missing_ok=True)
            (folder / ".metadata.tmp").unlink(missing_ok=True)
            folder.rmdir()  # only if nothing else is in it


class Reader(FileSystemReader):
    """A checkpoint, opened. Raises OSError or ValueError when it is none, or when a data file is not whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = self.read_metadata()
        if not isinstance(self.metadata.planner_data, dict) or "nbkit" not in self.metadata.planner_data:
            raise ValueError("written by something else than nbkit")
        self.about: bytes = self.metadata.planner_data["nbkit"]
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            if (size := (path / name).stat().st_size) < end:
                raise ValueError(f"{name} has {size} bytes of {end}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Plain(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"its .metadata is a {type(found).__name__}")
        return found

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Key -> dtype of every tensor in it."""
        kept = self.metadata.state_dict_metadata.items()
        return {key: each.properties.dtype for key, each in kept if isinstance(each, TensorStorageMetadata)}


class _Plain(pickle.Unpickler):
    """Finds what metadata is made of and nothing else: a checkpoint from elsewhere cannot run code here."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise ValueError(f"its .metadata holds a {module}.{name}")


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


@torch.no_grad()
def fill(reader: Reader, target: State) -> None:
    """Fill the tensors of `target` from the disk, one kept box after the other. On this rank alone."""
    planner = Filling(target)
    planner.set_up_planner({}, reader.metadata, is_coordinator=True)
    reader.set_up_storage_reader(reader.metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _seen(tensor: Tensor, layout: Layout, box: Box) -> Tensor:
    """`box` of the global tensor, as a view of the local one."""
    here, there = next(piece for piece in layout.pieces if within(box, piece[1]))
    return tensor.detach()[box.moved(there.start, here.start).slices]


def _sync(folder: Path) -> None:
    """The rename is on the disk too."""
    with suppress(OSError), io.FileIO(os.open(folder, os.O_RDONLY)) as file:
        os.fsync(file.fileno())
