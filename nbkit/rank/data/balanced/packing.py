"""Packs documents into blocks of one length. Positions restart in each document, and attention stays inside it.

The method is best fit decreasing (Johnson 1974; for training data: Ding et al. 2024, "Fewer truncations improve
language modeling"). The longest document comes first, and each document goes into the block with the least room that is
enough. Documents longer than a block are cut into pieces of a block's length. Every token is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nbkit.errors import TrainingError

IGNORED = -100
"""The target that cross entropy ignores by default."""


@dataclass(frozen=True)
class DocumentPiece:
    """Positions start to stop - 1 of a document."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Packed(Dataset[Any]):
    """Blocks of `size` positions. documents: token ids, or dicts with "input_ids", as from transformers' tokenizers.

    From ids, a block is ((ids, positions), targets). The target of a position is the next id of its document, so a
    document of n ids takes n - 1 positions. From dicts, a block is {"input_ids", "position_ids", "labels"}, and models
    shift the labels themselves. All tensors are int64 of shape (size,). The rest of a block is filled with a document
    whose targets are -100. The first label of a document is -100 too. groups: the group of each document. A block holds
    documents of one group.
    """

    def __init__(self, documents: Any, size: int, groups: Sequence[Hashable] | None = None) -> None:
        if size < 1:
            raise TrainingError("A block needs at least one position.", numbers=f"pack={size}", hint="pack=2048")
        self.documents, self.size = documents, size
        self.dicts = len(documents) > 0 and isinstance(documents[0], Mapping)
        pieces: dict[Hashable, list[DocumentPiece]] = {}
        for i in range(len(documents)):
            length = len(_ids(documents[i])) - (not self.dicts)
            cut = [DocumentPiece(i, start, min(start + size, length)) for start in range(0, length, size)]
            pieces.setdefault(None if groups is None else groups[i], []).extend(cut)
        packed = [(block, group) for group, own in pieces.items() for block in best_fit(own, size)]
        self.blocks = [block for block, _ in packed]
        self.groups = None if groups is None else [group for _, group in packed]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def waste(self) -> float:
        """Return the fraction of positions that hold no document."""
        used = sum(len(piece) for block in self.blocks for piece in block)
        return 1 - used / (len(self.blocks) * self.size) if self.blocks else 0.0

    def costs(self, of: Callable[[Any], float] | None) -> list[float]:
        """Return the cost of each block, the sum over its pieces.

        of: a function of a piece's ids that returns its cost. None takes the length of the piece.
        """
        return [sum(len(p) if of is None else of(self._cut(p)) for p in block) for block in self.blocks]

    def __getitem__(self, index: int) -> Any:
        ids, positions = torch.zeros(self.size, dtype=torch.long), torch.empty(self.size, dtype=torch.long)
        targets = torch.full((self.size,), IGNORED)
        at = 0
        for piece in self.blocks[index]:
            until = at + len(piece)
            ids[at:until], positions[at:until] = self._cut(piece), torch.arange(len(piece))
            if self.dicts:
                targets[at + 1 : until] = ids[at + 1 : until]
            else:
                targets[at:until] = self._cut(DocumentPiece(piece.document, piece.start + 1, piece.stop + 1))
            at = until
        positions[at:] = torch.arange(self.size - at)
        if self.dicts:
            return {"input_ids": ids, "position_ids": positions, "labels": targets}
        return (ids, positions), targets

    def _cut(self, piece: DocumentPiece) -> Tensor:
        return torch.as_tensor(_ids(self.documents[piece.document])[piece.start : piece.stop]).long()


def best_fit(pieces: Sequence[DocumentPiece], size: int) -> list[list[DocumentPiece]]:
    """Return blocks of at most `size` positions that hold all pieces. No piece may be longer than `size`."""
    blocks: list[list[DocumentPiece]] = []
    # Blocks by their free room. `rooms` has a bit for each room that occurs, which gives the next larger room at once.
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0
    for piece in sorted(pieces, key=len, reverse=True):
        if fitting := rooms >> len(piece):
            room = len(piece) + (fitting & -fitting).bit_length() - 1
            block = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            block, room = len(blocks), size
            blocks.append([])
        blocks[block].append(piece)
        with_room[room - len(piece)].append(block)
        rooms |= 1 << room - len(piece)
    return blocks


def _ids(document: Any) -> Any:
    return document["input_ids"] if isinstance(document, Mapping) else document
