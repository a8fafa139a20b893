"""Read checkpoints of plain FSDP2 and of torchtitan like nbkit's own, and convert nbkit's checkpoints to these layouts.

python -m nbkit.rank.train.checkpoint.torch_layouts DIR TARGET LAYOUT

Both layouts keep model and optimizer under the names of the model's state dict. Plain FSDP2 has {"model": ..., "optim":
...} of `get_state_dict`. torchtitan has the weights without a prefix, and a flattened optimizer. The reader searches
for the names with any prefix, so it also understands other prefixes ("app.model."). torch reads the tensors with
weights_only, which builds only tensors and plain values.

The `.metadata` of torch.distributed.checkpoint is a pickle, and torch's FileSystemReader calls the functions that it
names. Here such a file may contain only plain values (sizes, dtypes, offsets). Anything else is refused.
"""

from __future__ import annotations

import hashlib
import io
import pathlib
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nbkit.errors import NbkitError, TrainingError
from nbkit.planner.exchange import within
from nbkit.private_symbols import Missing
from nbkit.rank.torch_private import StorageInfo, memory_formats, tensor_layout
from nbkit.rank.train.checkpoint.dcp_io import DcpReader, fill
from nbkit.rank.train.checkpoint.job_state import by_name
from nbkit.rank.train.checkpoint.manifest import OURS, Chunk, SavedTensor, opened
from nbkit.tensor_layout import Box, Layout

_PICKLE = b"\x80"
_LARGEST = 1 << 30
_NAMED = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.TensorProperties,
        metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, memory_formats,
        StorageInfo, tensor_layout, torch.Size, OrderedDict,
    )
    if not isinstance(kind, Missing)
}  # fmt: skip
# The file contains the path of the directory that it was written to, as a pathlib object. The path is not used.
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}


def is_from_elsewhere(folder: Path) -> bool:
    """Return True if torch.distributed.checkpoint has written `folder` without nbkit.

    Then there are data files, but none has a name in nbkit's form.
    """
    try:
        names = [path.name for path in folder.glob("*.distcp")]
        with opened(folder / ".metadata") as file:
            return bool(names) and not any(map(OURS.fullmatch, names)) and file.read(1) == _PICKLE
    except (OSError, ValueError):
        return False


def read_metadata(path: Path) -> metadata.Metadata:
    """Read the metadata in the file `path`. Raises OSError, or any Exception if it is invalid or names other types."""
    with opened(path) as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path.name} was not written by torch.distributed.checkpoint")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMED:
            return _NAMED[module, name]
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


@dataclass(frozen=True)
class LoadTarget:
    """Facts about the job that loads, which a foreign checkpoint does not contain, or contains in another order.

    names: see own_state.names_of. groups, settings: parameter names and settings of each group of the optimizer.
    place_after: number of steps of this job -> the position in the data after them.
    """

    names: Sequence[tuple[str, str, tuple[int, ...]]]
    groups: Sequence[Sequence[str]]
    settings: Sequence[Mapping[str, Any]]
    seed: int
    place_after: Callable[[int], Any]


class TorchReader(DcpReader):
    """A DcpReader for a foreign checkpoint. Raises OSError, or another Exception if `path` is none."""

    def __init__(self, path: Path, wanted: LoadTarget) -> None:
        self.path = path
        found = read_metadata(path / ".metadata")
        self._places, self._stored = found.storage_data, found.state_dict_metadata
        self._lengths: dict[tuple[str, int], int] = {}
        self._by_owner: dict[str, list[str]] = {}
        for fqn in self._stored:
            self._by_owner.setdefault(fqn.rpartition(".")[0] + ".", []).append(fqn)
        self.digest = hashlib.sha256((path / ".metadata").read_bytes()).hexdigest()
        keys = self._weights(wanted)
        moments, numbers = self._state(keys)
        self.tensors = {key: self._kept(fqn) for key, fqn in (*keys.items(), *moments.items())}
        self.about = self._about(wanted, numbers)

    @property
    def layout(self) -> str:
        """Return the recognised layout, in words."""
        whose = {("model.", "optim."): "of plain FSDP2", ("", "optimizer."): "in torchtitan's layout"}
        model, optimizer = self._model, self._optimizer
        named = whose.get((model, optimizer or ""), f"with weights under {model!r} and state under {optimizer!r}")
        return f"a checkpoint {named}" if optimizer is not None else f"weights under {model!r}, no optimizer"

    def _weights(self, wanted: LoadTarget) -> dict[str, str]:
        """Return nbkit's key -> name in the checkpoint, for weights and buffers."""
        by_key: dict[str, list[str]] = {}
        for name, key, _ in wanted.names:
            by_key.setdefault(key, []).append(name)  # a tied weight is saved under one of its names, or under all
        first = next(iter(by_key.values()))
        before = {fqn.removesuffix(name) for fqn in self._stored for name in first if fqn.endswith(name)}
        held = {prefix: _under(prefix, by_key, self._stored) for prefix in before if not prefix or prefix[-1] == "."}
        self._model = max(held, key=lambda prefix: (len(held[prefix]), -len(prefix)), default="")
        found = held.get(self._model, {})
        if lacking := [names[0] for key, names in by_key.items() if key not in found]:
            raise ValueError(f"{lacking[:3]} of the model are not in it; it holds {sorted(self._stored)[:3]}")
        return found

    def _state(self, keys: Mapping[str, str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Return the optimizer state: (tensors with the shape of their parameter, other values of each parameter).

        The first is nbkit's key -> name in the checkpoint. The second is name of a parameter -> {key: value}.
        """
        moments, numbers = dict[str, str](), dict[str, dict[str, Any]]()
        before = {fqn[: fqn.index("state.")] for fqn in self._stored if "state." in fqn and fqn not in keys.values()}
        self._optimizer: str | None = None
        for prefix in sorted(before, key=len):
            for key, fqn in keys.items():
                kind, _, name = key.partition("/")
                if kind != "weight":
                    continue
                there = f"{prefix}state.{fqn.removeprefix(self._model)}."
                for each in self._beginning(there):
                    about, shape = each.removeprefix(there), self._shape(each)
                    self._optimizer = prefix
                    if shape and shape == self._shape(fqn):
                        moments[f"{about}/{name}"] = each
                    else:
                        numbers.setdefault(name, {})[about] = self._value(each)
            if self._optimizer is not None:
                break
        return moments, numbers

    def _shape(self, fqn: str) -> tuple[int, ...] | None:
        stored = self._stored[fqn]
        return tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None

    def _beginning(self, with_this: str) -> list[str]:
        return self._by_owner.get(with_this, [])

    def _about(self, wanted: LoadTarget, numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        settings = [self._group(wanted, index, group) for index, group in enumerate(wanted.settings)]
        steps = [int(value["step"]) for value in numbers.values() if "step" in value]
        told = next((fqn for fqn in self._stored if fqn == "step" or fqn.endswith("train_state.step")), None)
        step = int(self._value(told)) if told is not None else max(steps, default=0)
        place = wanted.place_after(step)
        return {
            "names": [list(each) for each in wanted.names],
            "groups": [list(group) for group in wanted.groups],
            "settings": settings,
            "numbers": {name: dict(values) for name, values in numbers.items()},
            "step": step,
            "position": place and place | {"base_lr": [float(g.get("initial_lr", g["lr"])) for g in settings]},
            "precision": {},
            "strategy": self.layout,
            "history": [],
            "seed": wanted.seed,
        }

    def _group(self, wanted: LoadTarget, index: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group.

        Plain FSDP2 stores them under the group's index, a flattened optimizer under the names of its parameters.
        """
        found = dict(own)
        if self._optimizer is None:
            return found
        there = f"{self._optimizer}param_groups."
        by_number = self._beginning(f"{there}{index}.")
        kept = next((fqn for fqn in by_number if fqn.endswith(".params")), None)
        if kept is not None and set(self._value(kept)) != set(wanted.groups[index]):
            raise ValueError(f"group {index} of its optimizer has different parameters: {self._value(kept)!r:.200}")
        by_name = self._beginning(f"{there}{wanted.groups[index][0]}.") if wanted.groups[index] else []
        for fqn in by_number if kept is not None else by_name:
            name = fqn.rpartition(".")[2]
            if name in found or name == "initial_lr":
                found[name] = self._value(fqn)
        return found

    def _kept(self, fqn: str) -> SavedTensor:
        stored = self._stored[fqn]
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{fqn!r:.80} is not a tensor")
        shape, chunks = tuple(stored.size), []
        for each in stored.chunks:
            box = Box(tuple(each.offsets), tuple(each.sizes))
            if not within(box, Box((0,) * len(shape), shape)):
                raise ValueError(f"it names an invalid part of {fqn!r:.80}: {box}")
            file, start = self._place(MetadataIndex(fqn, each.offsets))
            chunks.append(Chunk(box, file, start, 0))
        return SavedTensor(stored.properties.dtype, shape, tuple(chunks))

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._places[index]
        file = str(info.relative_path)
        if Path(file).name != file or not file.endswith(".distcp") or info.offset < 0 or info.length <= 0:
            raise ValueError(f"it names a data file {file!r:.80}, which no checkpoint has")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{file} is compressed, which nbkit does not read")
        self._lengths[file, info.offset] = info.length
        return file, info.offset

    def _value(self, fqn: str) -> Any:
        """Return the plain value or the tensor that is saved as `fqn`. A tensor must be saved in one part."""
        shape = self._shape(fqn)
        offset = None if shape is None else torch.Size([0] * len(shape))
        file_name, start = self._place(MetadataIndex(fqn, offset))
        with opened(self.path / file_name) as file:
            return self._loaded(file, file_name, start)

    def _loaded(self, file: io.BufferedReader, name: str, start: int) -> Any:
        length = self._lengths[name, start]
        file.seek(start)
        content = file.read(length)
        if len(content) != length:
            raise ValueError(f"{name} ends after {start + len(content)} bytes of {start + length}")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    @contextmanager
    def elements(self) -> Iterator[Callable[[SavedTensor, Chunk], Tensor]]:
        """See DcpReader.elements."""
        with ExitStack() as files:
            by_name: dict[str, io.BufferedReader] = {}

            def read_chunk(kept: SavedTensor, chunk: Chunk) -> Tensor:
                if chunk.file not in by_name:
                    by_name[chunk.file] = files.enter_context(opened(self.path / chunk.file))
                found = self._loaded(by_name[chunk.file], chunk.file, chunk.start)
                if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != (chunk.box.shape, kept.dtype):
                    raise ValueError(f"{chunk.file} does not hold at {chunk.start} what its .metadata says")
                return found

            yield read_chunk


def _under(prefix: str, by_key: Mapping[str, list[str]], stored: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, names in by_key.items():
        if (fqn := next((prefix + name for name in names if prefix + name in stored), None)) is not None:
            found[key] = fqn
    return found


LAYOUTS = ("fsdp2", "torchtitan")


def convert(folder: str | Path, target: str | Path, layout: str) -> tuple[int, int]:
    """Write the checkpoint in `folder` to the new directory `target`. Return (number of tensors, step).

    layout: "fsdp2" for {"model": ..., "optim": ...} as `get_state_dict` returns them; or "torchtitan" for weights
    without a prefix, a flattened optimizer and train_state.step. The whole checkpoint must fit into memory.
    Raises TrainingError if `folder` is no checkpoint or is damaged, or if `target` exists or cannot be written.
    """
    try:
        if layout not in LAYOUTS:
            raise ValueError(f"there is no layout {layout!r:.40}, only {', '.join(LAYOUTS)}")
        if Path(target).exists():
            raise ValueError(f"{target} exists already")
        reader = DcpReader(Path(folder))
        from torch.distributed.checkpoint.state_dict_saver import save

        state = (_plain if layout == "fsdp2" else _torchtitan)(reader)
        save(state, checkpoint_id=target, no_dist=True)
    except Exception as error:  # the directory may contain anything
        raise TrainingError(
            f"The checkpoint {str(folder)!r} could not be converted to {str(target)!r}.",
            numbers=f"{type(error).__name__}: {error}",
            hint="nbkit checkpoint convert DIR TARGET --to fsdp2   (DIR as given to trainer.save)",
        ) from error
    return len(reader.tensors), reader.about["step"]


def _plain(reader: DcpReader) -> dict[str, Any]:
    about = reader.about
    settings = zip(about["settings"], about["groups"], strict=True)
    groups = [{**group, "params": list(names)} for group, names in settings]
    return {"model": _model(reader), "optim": {"state": _optimizer(reader), "param_groups": groups}}


def _torchtitan(reader: DcpReader) -> dict[str, Any]:
    about = reader.about
    flat: dict[str, Any] = {}
    for name, kept in _optimizer(reader).items():
        flat |= {f"state.{name}.{key}": value for key, value in kept.items()}
    for group, names in zip(about["settings"], about["groups"], strict=True):
        flat |= {f"param_groups.{name}.{key}": value for name in names for key, value in group.items()}
    return {**_model(reader), "optimizer": flat, "train_state": {"step": torch.tensor(about["step"])}}


def _model(reader: DcpReader) -> dict[str, Tensor]:
    return {name: _tensor(reader, key, tuple(shape)) for name, key, shape in reader.about["names"]}


def _optimizer(reader: DcpReader) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of each parameter, by name."""
    found: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in reader.about["numbers"].items()}
    for name, kinds in by_name(reader.kinds).items():
        for kind in kinds:
            key = f"{kind}/{name}"
            found.setdefault(name, {})[kind] = _tensor(reader, key, reader.tensors[key].shape)
    return {name: kept for name, kept in found.items() if kept}


def _tensor(reader: DcpReader, key: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.zeros(shape, dtype=reader.kinds.get(key, torch.float32))  # tensors without elements have no dtype
    fill(reader, {key: (tensor, Layout.whole(shape))})
    return tensor


if __name__ == "__main__":
    try:
        number, made = convert(*sys.argv[1:])
    except NbkitError as failure:
        sys.exit(f"nbkit: {failure}")
    print(f"{sys.argv[2]}: {number} tensors, step {made}")
