"""The `.metadata` of torch.distributed.checkpoint, a pickle, read without running anything that it names.

What it may name are the plain values of such a file: sizes, dtypes, places. Anything else is refused.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from nbkit.private_symbols import Missing
from nbkit.rank.torch_private import StorageInfo, memory_formats, tensor_layout
from nbkit.rank.train.checkpoint.manifest import OURS, opened

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
# Of the directory that it was written to, whose name is not used.
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}


def is_from_elsewhere(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint alone wrote `folder`: data files, none of which is named as nbkit does."""
    try:
        names = [path.name for path in folder.glob("*.distcp")]
        with opened(folder / ".metadata") as file:
            return bool(names) and not any(map(OURS.fullmatch, names)) and file.read(1) == _PICKLE
    except (OSError, ValueError):
        return False


def read_metadata(path: Path) -> metadata.Metadata:
    """Raises OSError, or any Exception where it is none, or names what no such file has to."""
    with opened(path) as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path.name} is none of torch.distributed.checkpoint's")
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
