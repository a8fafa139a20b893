"""Output of a rank, marked and kept: every message an engine publishes while a cell runs passes here once.

Each gets the cell it belongs to and a number, so that the notebook knows when it has all of them, and each is
written to disk before it is sent, so that a notebook which comes later can be given what it missed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from nbkit.bridge.output.comms import Comms
from nbkit.bridge.output.length_limit import limited
from nbkit.wire.cells import COMM_TYPES
from nbkit.wire.text_encoding import encodable

OUTPUT_TYPES = frozenset({"stream", "display_data", "update_display_data", "clear_output"})
FLUSH_SECONDS = 0.01  # ipykernel's own is 0.2 s; a person watching a print should not wait for it
"""Text goes out at most so often, also where a program flushes after each character: a notebook that gets a hundred
thousand messages has no time for a stop."""
LOG_LIMIT = 64 << 20  # bytes of one rank's replay log, and of what it printed; older cells are dropped first


@dataclass
class Capturing:
    """The messages that one cell has published so far."""

    cell: str
    count: int = 0
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class _PacedText:
    """Sends what is written to stdout and stderr, flushed or not, in few messages and in order. In ipykernel's thread.

    held: the stream whose text waits for the next message.
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        self.held: Any = None
        self._sent, self._at_once = 0.0, False
        self.streams = tuple(streams)
        self._flush = {stream: stream._flush for stream in streams if hasattr(stream, "_flush")}
        for stream in streams:
            stream.flush_interval = FLUSH_SECONDS
            if stream in self._flush:
                stream._flush = partial(self._soon, stream)

    def all(self) -> None:
        """Send what is held now: what is published next comes after it."""
        self._at_once = True
        try:
            for stream in self.streams:
                stream.flush()
        finally:
            self._at_once = False

    def _soon(self, stream: Any) -> None:
        if self.held not in (None, stream):
            self._now(self.held)
        wait = self._sent + FLUSH_SECONDS - monotonic()
        if wait <= 0 or self._at_once:
            self._now(stream)
        elif self.held is None:
            self.held = stream
            stream.pub_thread.io_loop.call_later(wait, self._due)

    def _due(self) -> None:
        if self.held is not None:
            self._now(self.held)

    def _now(self, stream: Any) -> None:
        self.held, self._sent = None, monotonic()
        self._flush[stream]()


@dataclass
class Capture:
    """Wraps `session.send` of an engine. One per process."""

    rank: int
    folder: Path
    stack: list[Capturing] = field(default_factory=list)
    last: str = ""
    starts: dict[str, int] = field(default_factory=dict)  # cell -> where its outputs begin in the replay log
    lock: threading.Lock = field(default_factory=threading.Lock)
    unkept: str = ""  # why what is shown now is not kept on disk, such as that it is full

    def install(self, session: Any) -> None:
        """Put this between everything that publishes and the socket."""
        self._send: Callable[..., Any] = session.send
        self._open()
        self.comms = Comms(self._deliver, self._keep, self._mark)
        session.send = self.send
        self._paced = _PacedText((sys.stdout, sys.stderr))

        def plain() -> None:
            # A forked child (multiprocessing, DataLoader workers) has neither the thread that publishes nor a count
            # of its own. What it prints goes through the descriptors, which this process reads.
            session.send = lambda *args, **options: None
            self.lock = threading.Lock()  # another thread may have held it
            sys.stdout = open(os.dup(1), "w", buffering=1, errors="replace")
            sys.stderr = open(os.dup(2), "w", buffering=1, errors="replace")

        os.register_at_fork(after_in_child=plain)

    def _open(self) -> None:
        self._replay: TextIO = _open_private(self.folder / f"rank{self.rank}.jsonl")
        self._text: TextIO = _open_private(self.folder / f"rank{self.rank}.out")

    @property
    def streams(self) -> tuple[Any, ...]:
        """stdout and stderr as this process had them when it began."""
        return self._paced.streams

    def begin(self, cell: str) -> Capturing:
        """Mark output with `cell` from now on."""
        capturing = Capturing(cell)
        with self.lock:
            if self.unkept and not self.stack:
                self._keep_again()
            self._trim()
            self.stack.append(capturing)
            self.last = cell
            if not self.unkept:
                self.starts[cell] = self._replay.tell()
        return capturing

    def end(self, capturing: Capturing) -> None:
        """Flush, so that `capturing.count` is final; what a thread prints later goes to the log and to no count."""
        self._paced.all()
        if self.unkept and len(self.stack) == 1:
            print(f"What this cell shows is not kept on disk: {self.unkept}", file=sys.stderr)
            self._paced.all()
        self.comms.settle()
        with self.lock:
            self.stack.remove(capturing)

    def send(self, stream: Any, msg_or_type: Any, content: Any = None, *rest: Any, **options: Any) -> Any:
        """`Session.send`, with the cell's mark on what is output."""
        message = isinstance(msg_or_type, dict)
        kind = msg_or_type["msg_type"] if message else msg_or_type
        if kind == "status" and ((options.get("parent") or {}).get("metadata") or {}).get("nbkit") == "call":
            return None  # nobody waits for busy and idle of our own calls, and each costs two hops
        if kind in ("execute_result", "error"):
            # Both travel in the record that answers the cell, in one message instead of two.
            with self.lock:
                if self.stack:
                    body = msg_or_type["content"] if message else content
                    setattr(self.stack[-1], "result" if kind == "execute_result" else "error", encodable(limited(body)))
                    return None
        if kind in COMM_TYPES:
            return self.comms.send(stream, kind, content, **options)
        if kind in OUTPUT_TYPES and kind != "stream" and self._paced.held is not None:
            self._paced.all()
        if kind in OUTPUT_TYPES:
            body = msg_or_type["content"] if message else content
            if kind in ("display_data", "update_display_data"):
                body = limited(body)
                if message:
                    msg_or_type = {**msg_or_type, "content": body}
                else:
                    content = body
            if self.comms.take(kind, body):
                return self._write_text(kind, body)
            mark = self._keep(kind, body)
            if message:
                msg_or_type["metadata"]["nbkit"] = mark
            else:
                options["metadata"] = {**(options.get("metadata") or {}), "nbkit": mark}
        return self._deliver(stream, msg_or_type, content, *rest, **options)

    def _deliver(self, stream: Any, msg_or_type: Any, content: Any = None, *rest: Any, **options: Any) -> Any:
        try:
            return self._send(stream, msg_or_type, content, *rest, **options)
        except UnicodeEncodeError:  # nothing has gone out; a message that is not sent would be waited for
            return self._send(stream, encodable(msg_or_type), encodable(content), *rest, **options)

    def publish(self, kind: str, content: dict[str, Any], stream: Any) -> None:
        """Send a message of nbkit's own to every notebook that listens."""
        self.send(stream, kind, content, metadata={"nbkit": {"rank": self.rank, "cell": "", "seq": -1}})

    def missed(self, cell: str, cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Outputs of `cell` as they were sent, about `limit` bytes of them, and the cursor to go on from.

        cursor: 0 for the cell's first output.
        """
        found: list[dict[str, Any]] = []
        with open(self.folder / f"rank{self.rank}.jsonl", encoding="utf-8") as log:
            start = cursor or self.starts.get(cell, 0)
            log.seek(start)
            while log.tell() - start < limit and (line := log.readline()).endswith("\n"):
                with suppress(ValueError):  # it was cut where the disk was full
                    if (kept := json.loads(line))["cell"] == cell:
                        found.append(kept)
                cursor = log.tell()
        return found, cursor

    def _keep(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            mark = self._mark()
            if self.stack:
                mark["seq"] = self.stack[-1].count
                self.stack[-1].count += 1
            self._write(self._replay, json.dumps({**mark, "kind": kind, "content": content}, default=str) + "\n")
        self._write_text(kind, content)
        return mark

    def _mark(self) -> dict[str, Any]:
        """The mark of a message that is not counted."""
        stack = self.stack
        return {"rank": self.rank, "cell": stack[-1].cell if stack else self.last, "seq": -1}

    def _write_text(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            with self.lock:
                self._write(self._text, content["text"])

    def _write(self, file: TextIO, text: str) -> None:
        """To a disk that may be full: a message that is not kept is sent all the same, or it would be waited for."""
        if self.unkept:
            return
        try:
            file.write(text)
            file.flush()
        except (OSError, ValueError) as error:
            self.unkept = str(error)

    def _keep_again(self) -> None:
        """There may be room again. What was written in part is left behind, as a line that nobody can read."""
        for file in (self._replay, self._text):
            with suppress(OSError, ValueError):
                file.close()
        self.unkept = ""
        try:
            self._open()
        except OSError as error:
            self.unkept = str(error)
            return
        self._write(self._replay, "\n")

    def _trim(self) -> None:
        """Before a cell and not after one: the last cell's outputs may still be asked for."""
        if self.unkept:
            return
        if self._replay.tell() > LOG_LIMIT and not self.stack:
            self._replay.seek(0)  # truncating leaves the position, and `starts` is made of it
            self._replay.truncate()
            self.starts.clear()
        if self._text.tell() > LOG_LIMIT and not self.stack:
            self._text.truncate(0)


def _open_private(path: Path) -> TextIO:
    return open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8", errors="backslashreplace"
    )
