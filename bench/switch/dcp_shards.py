"""A rank's part of a tensor, in the form that torch.distributed.checkpoint saves and loads with its own planners."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nbkit.tensor_layout import Layout


class _Part(Tensor):
    """A placeholder of the global shape that answers as a DTensor does: which boxes of it are here, and where."""

    part: Tensor
    extent: Layout

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(there.start), torch.Size(there.shape)) for _, there in self.extent.pieces
        ]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        about = TensorProperties(dtype=self.part.dtype)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, torch.Size(self.extent.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        here = next(here for here, there in self.extent.pieces if torch.Size(there.start) == index.offset)
        return self.part[here.slices]


def stored(tensor: Tensor, layout: Layout) -> Tensor:
    """`tensor`, which is that part of a global one, as a value of a state dict."""
    placeholder = torch.empty((), dtype=tensor.dtype).expand(layout.shape).as_subclass(_Part)
    placeholder.part, placeholder.extent = tensor, layout
    return placeholder
