"""The beginning of what a rank printed, for `Results.output`; the file on disk has all of it."""

from __future__ import annotations

import io

KEPT_CHARACTERS = 1 << 20


class KeptText:
    """Text that arrives in pieces. Each is copied: a list would hold an object for every print of a long training."""

    def __init__(self) -> None:
        self._text = io.StringIO()

    def add(self, text: str) -> None:
        self._text.write(text[: KEPT_CHARACTERS - self._text.tell()])

    def __str__(self) -> str:
        return self._text.getvalue()
