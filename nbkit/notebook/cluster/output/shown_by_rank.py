"""What the ranks of a cell have shown: a page can be cleared only as a whole, and then the others' is shown again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

KEPT_CHARACTERS = 100_000  # the newest; more takes seconds to send again
_PIECE_CHARACTERS = 100  # that a message counts for beside its text
NOBODY = -1  # nbkit itself


@dataclass(frozen=True)
class Piece:
    """A message that a rank has shown. kind, content: as in Jupyter's protocol."""

    rank: int
    kind: str
    content: dict[str, Any]

    @property
    def size(self) -> int:
        """Characters."""
        texts = [self.content.get("text"), *self.content.get("data", {}).values()]
        return _PIECE_CHARACTERS + sum(len(text) for text in texts if isinstance(text, str))

    @property
    def display_id(self) -> object:
        """By which it is updated; None for none."""
        return (self.content.get("transient") or {}).get("display_id")


class ShownByRank:
    """The pieces of one cell that are on its screen, the oldest first."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self._size = 0

    def add(self, piece: Piece) -> None:
        """Something more is shown, or what was shown has other contents."""
        if piece.kind == "update_display_data":
            for i, each in enumerate(self._pieces):
                if each.rank == piece.rank and each.display_id == piece.display_id is not None:
                    self._pieces[i] = replace(piece, kind=each.kind)
                    self._size += self._pieces[i].size - each.size
            return
        self._pieces.append(piece)
        self._size += piece.size
        while self._size > KEPT_CHARACTERS and len(self._pieces) > 1:
            self._size -= self._pieces.popleft().size

    def clear(self, ranks: Collection[int]) -> list[Piece] | None:
        """Forget what `ranks` have shown; what stays, to be shown again. None where they had shown nothing."""
        kept = [piece for piece in self._pieces if piece.rank not in ranks]
        if len(kept) == len(self._pieces):
            return None
        self._pieces, self._size = deque(kept), sum(piece.size for piece in kept)
        return kept
