"""The screen of a cell's output: the notebook cell that started it, or plain stdout.

Jupyter's server drops stream output above 1 MB/s, averaged over 3 s. `OutputBudget` keeps a kernel's output just below
this limit, so that no lines are lost.

`ShownByRank` keeps the newest output of each rank, because a page can be cleared only as a whole: after a
`clear_output` of one rank, the output of the others is shown again. `KeptText` keeps the beginning of a rank's printed
text for `Results.output`. The file on disk has all of it.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbkit.notebook.cluster.registry import notebook_shell
from nbkit.wire.text_encoding import encodable

BLOCK_CHARACTERS = 200_000


class Screen(Protocol):
    """A place for output. All calls come from one thread. clears: the screen can clear its output."""

    paced: bool
    clears: bool

    def stream(self, name: str, text: str) -> None: ...
    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None: ...
    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None: ...
    def clear(self, wait: bool) -> None: ...
    def comm(self, kind: str, content: dict[str, Any]) -> None: ...


class KernelScreen:
    """The output area of the notebook cell that runs when this is created. It works even after that cell has ended."""

    paced = clears = True

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.parent = kernel.get_parent("shell") if hasattr(kernel, "get_parent") else kernel._parent_header

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel, options = self.kernel, {"parent": self.parent, "ident": self.kernel._topic(kind)}
        try:
            kernel.session.send(kernel.iopub_socket, kind, content, **options)
        except UnicodeEncodeError:
            kernel.session.send(kernel.iopub_socket, kind, encodable(content), **options)

    def stream(self, name: str, text: str) -> None:
        self._send("stream", {"name": name, "text": text})

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        self._send("display_data", {"data": data, "metadata": metadata, "transient": transient})

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        self._send("update_display_data", {"data": data, "metadata": metadata, "transient": transient})

    def clear(self, wait: bool) -> None:
        self._send("clear_output", {"wait": wait})

    def comm(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message from a rank's widget to the pages of this kernel."""
        kernel, body = self.kernel, dict(content)
        metadata, buffers = body.pop("metadata"), body.pop("buffers")
        # Buffers from a rank's log are base64 text.
        buffers = [base64.b64decode(buffer) if isinstance(buffer, str) else buffer for buffer in buffers]
        ident = f"comm-{body['comm_id']}".encode()
        kernel.session.send(
            kernel.iopub_socket, kind, body, parent=self.parent, ident=ident, metadata=metadata, buffers=buffers
        )


class PlainScreen:
    """stdout and stderr of this process. Rich output is shown as its text."""

    paced = clears = False

    def stream(self, name: str, text: str) -> None:
        out = sys.stderr if name == "stderr" else sys.stdout
        try:
            out.write(text)
        except UnicodeEncodeError:  # the terminal's encoding, or UTF-8, lacks a character
            encoding = out.encoding or "ascii"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        self.stream("stdout", f"{data.get('text/plain', f'<{sorted(data)[0]}>')}\n")

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        self.display(data, metadata, transient)

    def clear(self, wait: bool) -> None:
        return

    def comm(self, kind: str, content: dict[str, Any]) -> None:
        return


class NoScreen(PlainScreen):
    """A screen that shows nothing, for a cell whose result is not shown as output."""

    def stream(self, name: str, text: str) -> None:
        return


showing: ContextVar[Screen | None] = ContextVar("showing", default=None)
"""The screen for cells that are sent in this context, for programs that are not a notebook; None: the notebook's."""


def here() -> Screen:
    """Return the screen of the caller: `showing` if it is set, else the current notebook cell, or stdout."""
    if (screen := showing.get()) is not None:
        return screen
    kernel = getattr(notebook_shell(), "kernel", None)
    if kernel is None:
        return PlainScreen()
    redirected = not hasattr(sys.stdout, "pub_thread")  # %%capture, contextlib.redirect_stdout
    return PlainScreen() if redirected else KernelScreen(kernel)


def same_place(one: Screen, other: Screen) -> bool:
    """Return True if both screens are the same place: the output area of one cell, or stdout."""
    parents = [getattr(screen, "parent", {}).get("header", {}).get("msg_id") for screen in (one, other)]
    kinds = [isinstance(screen, KernelScreen) for screen in (one, other)]
    return kinds[0] == kinds[1] and parents[0] == parents[1]


class OutputBudget:
    """A token bucket that limits the output: it holds `burst` bytes, and fills at `rate` bytes per second.

    burst + 3 s x rate is below the server's limit for its window of 3 s.
    """

    def __init__(self, rate: float = 700_000, burst: float = 700_000) -> None:
        self.rate, self.burst = rate, burst
        self.left, self.at = burst, time.monotonic()

    def spend(self, size: int) -> float:
        """Take `size` bytes out of the bucket. Return the seconds to wait before the next output."""
        now = time.monotonic()
        self.left = min(self.burst, self.left + (now - self.at) * self.rate) - size
        self.at = now
        return max(0.0, -self.left / self.rate)


PACE = OutputBudget()  # one per kernel: the server counts all cells together


class Outbox:
    """A queue of output for a screen. Output is shown in order, and no faster than Jupyter's server accepts.

    All calls come from one thread. later: runs a function on this thread after the given number of seconds. failed:
    called with the kind of a message that could not be shown, and the error. Later messages are still shown.
    """

    def __init__(
        self,
        screen: Screen,
        later: Callable[[float, Callable[[], None]], Any],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.screen, self.later, self.failed = screen, later, failed
        self.queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.asleep = False
        self.when_empty: list[Callable[[], None]] = []
        self.skipped = 0

    def stream(self, name: str, text: str) -> None:
        last = self.queue[-1] if self.queue else None
        if last and last[0] == "stream" and last[1][0] == name and len(last[1][1]) + len(text) < BLOCK_CHARACTERS:
            self.queue[-1] = ("stream", (name, last[1][1] + text))
        else:
            for start in range(0, len(text), BLOCK_CHARACTERS):
                self.queue.append(("stream", (name, text[start : start + BLOCK_CHARACTERS])))
        self._go()

    def put(self, kind: str, *content: Any) -> None:
        """Queue a call of the screen: `display`, `update`, `clear` or `comm`."""
        self.queue.append((kind, content))
        self._go()

    def drop(self) -> int:
        """Drop the queued text, after the user has stopped a flood of output. Return the number of lines."""
        kept = [item for item in self.queue if item[0] != "stream"]
        lines: int = sum(item[1][1].count("\n") for item in self.queue if item[0] == "stream")
        self.queue = deque(kept)
        return lines

    def flushed(self, function: Callable[[], None]) -> None:
        """Call `function` when everything queued so far has been shown."""
        self.when_empty.append(function)
        self._go()

    def _wake(self) -> None:
        self.asleep = False
        self._go()

    def _go(self) -> None:
        while not self.asleep and self.queue:
            kind, content = self.queue.popleft()
            try:
                getattr(self.screen, kind)(*content)
            except Exception as error:  # later output must still be shown, and `flushed` functions called
                self.failed(kind, error)
            if self.screen.paced and kind == "stream":
                wait = PACE.spend(len(json.dumps(content[1])) + 60)
                if wait > 0:
                    self.asleep = True
                    self.later(wait, self._wake)
        if not self.queue and not self.asleep:
            ready, self.when_empty = self.when_empty, []
            for function in ready:
                function()


RESENT_CHARACTERS = 100_000  # of the newest output; more would take seconds to send again
_PIECE_CHARACTERS = 100  # added to a message's text when its size is counted
NOBODY = -1  # nbkit itself


@dataclass(frozen=True)
class ShownMessage:
    """A message that a rank has shown. kind, content: as in Jupyter's protocol."""

    rank: int
    kind: str
    content: dict[str, Any]

    @property
    def size(self) -> int:
        """Return the size in characters."""
        texts = [self.content.get("text"), *self.content.get("data", {}).values()]
        return _PIECE_CHARACTERS + sum(len(text) for text in texts if isinstance(text, str))

    @property
    def display_id(self) -> object:
        """Return the id under which the output can be updated, or None."""
        return (self.content.get("transient") or {}).get("display_id")


class ShownByRank:
    """The messages of one cell that are on its screen, oldest first."""

    def __init__(self) -> None:
        self._pieces: deque[ShownMessage] = deque()
        self._size = 0

    def add(self, piece: ShownMessage) -> None:
        """Record a new message, or new contents of an earlier one."""
        if piece.kind == "update_display_data":
            for i, each in enumerate(self._pieces):
                if each.rank == piece.rank and each.display_id == piece.display_id is not None:
                    self._pieces[i] = replace(piece, kind=each.kind)
                    self._size += self._pieces[i].size - each.size
            return
        self._pieces.append(piece)
        self._size += piece.size
        while self._size > RESENT_CHARACTERS and len(self._pieces) > 1:
            self._size -= self._pieces.popleft().size

    def clear(self, ranks: Collection[int]) -> list[ShownMessage] | None:
        """Remove the messages of `ranks`. Return the others, to show them again; None if nothing was removed."""
        kept = [piece for piece in self._pieces if piece.rank not in ranks]
        if len(kept) == len(self._pieces):
            return None
        self._pieces, self._size = deque(kept), sum(piece.size for piece in kept)
        return kept


KEPT_CHARACTERS = 1 << 20


class KeptText:
    """The beginning of a text that arrives in pieces, at most KEPT_CHARACTERS.

    It is one buffer, because a list would hold an object for every print of a long training.
    """

    def __init__(self) -> None:
        self._text = io.StringIO()

    def add(self, text: str) -> None:
        self._text.write(text[: KEPT_CHARACTERS - self._text.tell()])

    def __str__(self) -> str:
        return self._text.getvalue()
