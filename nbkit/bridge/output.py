"""The output of a rank. Every message that an engine publishes while a cell runs passes through this module once.

`OutputCapture` marks each message with its cell and a number, so that the notebook knows when it has all of them. It
writes each message to disk before it is sent, so that a notebook that connects later can get what it missed. Long
values, pictures and errors are cut (`limited`), because unlimited text would fill the notebook and its kernel.

`RankComms` slows the messages of widgets to a pace that pages can follow. A progress bar updates thirty times a second.
Such updates are held for a moment and sent as one. They are not counted among the cell's outputs, and not written to
disk. At the end of the cell the final state is sent once more; it is counted and written. So a finished bar looks
finished, also in a notebook that connects later.

`OutputWidgets` is the rank's side of `with ipywidgets.Output():`, which rich's progress bars use. Text that is printed
inside goes into the widget. With a notebook's own kernel the page does that, because it knows which cell prints. Here
all ranks print in one cell of the notebook. So each rank does it itself, and sends the page the widget's content.

`draw_as_text` draws progress bars as text if the program uses `tqdm.auto`, or a library built on it. As widgets there
would be one bar for each rank; they move only on a page that shows widgets, and are lost with the page. Text takes one
line for all ranks, works wherever output does, and stays in the notebook. `tqdm.notebook` is still a widget.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from nbkit.wire.cells import COMM_TYPES
from nbkit.wire.messages import NEWS, ForNotebook, encoded
from nbkit.wire.text_encoding import encodable

KEPT_CHARACTERS = 200_000  # of one text; the file on disk has all of it
_REWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")  # text that a terminal would have overwritten


@dataclass
class _Area:
    """The outputs of one widget, in the format of notebooks. places: id of an updatable display -> its index."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    clear_next: bool = False

    def add(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "clear_output":
            self.clear_next = True
            if not content.get("wait"):
                self._clear()
            return
        if self.clear_next:
            self._clear()
        last = self.outputs[-1] if self.outputs else {}
        if kind == "stream" and last.get("name") == content["name"]:
            self.outputs[-1] = {**last, "text": _as_on_screen(last["text"] + content["text"])}
        elif kind == "stream":
            text = _as_on_screen(content["text"])
            self.outputs.append({"output_type": "stream", "name": content["name"], "text": text})
        else:
            output = {"output_type": "display_data", "data": content["data"], "metadata": content["metadata"]}
            place = self.places.get(_display_id(content))
            if kind == "update_display_data" and place is not None:
                self.outputs[place] = output
            else:
                self.places[_display_id(content)] = len(self.outputs)
                self.outputs.append(output)

    def _clear(self) -> None:
        self.outputs, self.places, self.clear_next = [], {}, False


class OutputWidgets:
    """The output widgets of one rank, by the ids of their comms."""

    def __init__(self) -> None:
        self._areas: dict[str, _Area] = {}
        self._entered: list[str] = []  # widgets whose `with` block runs, the innermost last
        self._left: list[str] = []  # widgets whose block has ended, and whose Python objects lack their outputs
        self._telling = ""

    def on_open(self, comm: str, state: dict[str, Any]) -> None:
        if state.get("_model_name") == "OutputModel":
            self._areas[comm] = _Area(list(state.get("outputs") or ()))

    def on_close(self, comm: str) -> None:
        self._areas.pop(comm, None)
        self._entered = [other for other in self._entered if other != comm]

    def on_update(self, comm: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a widget's update that is sent to pages."""
        area = self._areas.get(comm)
        if area is None:
            return state
        if "outputs" in state:  # set by append_stdout and similar methods
            area.outputs, area.places = list(state["outputs"]), {}
        if "msg_id" in state:
            self._entered = [other for other in self._entered if other != comm]
            if state["msg_id"]:
                self._entered.append(comm)
            else:
                self._left.append(comm)
        return {name: value for name, value in state.items() if name != "msg_id"}

    def take(self, kind: str, content: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Put an output into its widget. Returns (comm, update for pages), or None if it belongs to no widget."""
        if kind == "update_display_data":
            # It may belong to a widget whose `with` block has ended, or to the cell itself.
            known = [comm for comm, area in self._areas.items() if _display_id(content) in area.places]
            comm = known[-1] if known else None
        else:
            comm = self._entered[-1] if self._entered else None
        if comm is None:
            return None
        area = self._areas[comm]
        area.add(kind, content)
        # With `wait` the page keeps the old outputs until the next one comes.
        return comm, {} if kind == "clear_output" and content.get("wait") else {"outputs": list(area.outputs)}

    def is_echo(self, comm: str, data: dict[str, Any]) -> bool:
        """Return True if a widget only repeats the state that `tell_objects` has given it."""
        return comm == self._telling and data.get("method") == "echo_update"

    def tell_objects(self) -> None:
        """Set the outputs of the Python objects of widgets whose `with` block has ended, as a page would."""
        while self._left:
            comm = self._left.pop()
            manager = sys.modules["comm"].get_comm_manager()
            found, area = manager.comms.get(comm), self._areas.get(comm)
            callback = getattr(found, "_msg_callback", None)  # handle_msg would also run the hooks of a cell
            if area is None or callback is None:
                continue
            data = {"method": "update", "state": {"outputs": list(area.outputs)}, "buffer_paths": []}
            self._telling = comm
            try:
                callback({"content": {"comm_id": comm, "data": data}, "metadata": {}, "buffers": []})
            finally:
                self._telling = ""


def _as_on_screen(text: str) -> str:
    return _REWRITTEN.sub("", text)[-KEPT_CHARACTERS:]


def _display_id(content: dict[str, Any]) -> str:
    return str((content.get("transient") or {}).get("display_id", ""))


PACE_SECONDS = 0.1  # between two updates of one widget
CHARACTERS_PER_SECOND = 2_000_000  # the greatest rate of large updates

Keep = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass
class _Update:
    """The updates of a widget. state: all changes since the cell began. waiting: changes that were not sent yet."""

    stream: Any
    options: dict[str, Any]
    state: dict[str, Any]
    waiting: dict[str, Any]


class RankComms:
    """The comms of one rank: the messages between its widgets and the pages. There is one object per rank.

    send: the session's own method. keep: counts and keeps a message of the running cell, and returns its mark. mark:
    returns a mark for a message that is not counted.
    """

    def __init__(self, send: Callable[..., Any], keep: Keep, mark: Callable[[], dict[str, Any]]) -> None:
        self._send, self._keep, self._mark = send, keep, mark
        self._output_widgets = OutputWidgets()
        self._updates: dict[str, _Update] = {}
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    def send(self, stream: Any, kind: str, content: dict[str, Any], **options: Any) -> None:
        """Publish the message of a comm, with the mark of the running cell."""
        comm, data, widgets = content["comm_id"], content.get("data") or {}, self._output_widgets
        with self._lock:
            if _is_update(kind, data, options.get("buffers")):
                update = self._updates.setdefault(comm, _Update(stream, options, {}, {}))
                self._hold(update, widgets.on_update(comm, data["state"]))
            elif not widgets.is_echo(comm, data):
                self._let_go(comm, counted=False)  # earlier updates have to arrive before this message
                mark = self._mark() if kind == "comm_msg" else self._kept(kind, content, options)
                self._send(stream, kind, content, **_marked(options, mark))
            if kind == "comm_open":
                widgets.on_open(comm, data.get("state") or {})
            elif kind == "comm_close":
                widgets.on_close(comm)
                self._updates.pop(comm, None)
        widgets.tell_objects()

    def take(self, kind: str, content: dict[str, Any]) -> bool:
        """Return True if this output goes into a widget, and not into the cell."""
        with self._lock:
            taken = self._output_widgets.take(kind, content)
            if taken is not None:
                self._hold(self._updates[taken[0]], taken[1])
            return taken is not None

    def settle(self) -> None:
        """Send what has changed in the cell, and count it. Called just before the cell ends."""
        with self._lock:
            for comm in list(self._updates):
                self._let_go(comm, counted=True)

    def _hold(self, update: _Update, state: dict[str, Any]) -> None:
        update.state.update(state)
        update.waiting.update(state)
        if state and self._timer is None:
            size = sum(len(str(value)) for value in state.values())
            self._timer = threading.Timer(PACE_SECONDS + size / CHARACTERS_PER_SECOND, self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            for comm in list(self._updates):
                self._let_go(comm, counted=False)

    def _let_go(self, comm: str, *, counted: bool) -> None:
        update = self._updates.get(comm)
        if update is None or not (update.state if counted else update.waiting):
            return
        state, update.waiting = (update.state if counted else update.waiting), {}
        content = {"comm_id": comm, "data": {"method": "update", "state": state, "buffer_paths": []}}
        if counted:
            update.state = {}
        mark = self._kept("comm_msg", content, update.options) if counted else self._mark()
        self._send(update.stream, "comm_msg", content, **_marked(update.options, mark))

    def _kept(self, kind: str, content: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Count a message and write it to disk, with its buffers as base64. Returns its mark."""
        buffers = [base64.b64encode(bytes(buffer)).decode() for buffer in options.get("buffers") or ()]
        return self._keep(kind, {**content, "metadata": options.get("metadata") or {}, "buffers": buffers})


def _marked(options: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    return {**options, "metadata": {**(options.get("metadata") or {}), "nbkit": mark}}


def _is_update(kind: str, data: dict[str, Any], buffers: Any) -> bool:
    """Return True if the message is the new state of a widget, which a later update replaces."""
    return kind == "comm_msg" and data.get("method") == "update" and "state" in data and not buffers


TEXT_LIMIT = 100_000  # characters of a value's text, and of each part of a traceback
PICTURE_LIMIT = 16 << 20  # characters of any other form (HTML, base64 of a picture)


def shortened(text: str, limit: int = TEXT_LIMIT, *, hint: str = "") -> str:
    """Return `text`. If it is too long, return its two ends and the number of characters left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out{hint} ...\n{text[-half:]}"


def limited(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a message that shows a value or an error, with long texts cut and large forms left out."""
    if "traceback" in content:
        lines = [shortened(line) for line in content["traceback"]]
        return {**content, "evalue": shortened(content["evalue"]), "traceback": lines}
    if not isinstance(data := content.get("data"), dict):
        return content
    shown = {kind: form for kind, form in data.items() if kind == "text/plain" or not _is_too_large(form)}
    text = shown.get("text/plain")
    if isinstance(text, str):
        shown["text/plain"] = shortened(text, hint=": %pull brings the whole value")
    if left_out := sorted(data.keys() - shown.keys()):
        sizes = ", ".join(f"{kind} of {len(data[kind]):,} characters" for kind in left_out)
        note = f"[not shown, the limit is {PICTURE_LIMIT:,}: {sizes}]"
        shown["text/plain"] = f"{shown['text/plain']}\n{note}" if "text/plain" in shown else note
    return {**content, "data": shown}


def _is_too_large(form: Any) -> bool:
    return isinstance(form, str | bytes) and len(form) > PICTURE_LIMIT


OUTPUT_TYPES = frozenset({"stream", "display_data", "update_display_data", "clear_output"})
FLUSH_SECONDS = 0.01  # ipykernel's default, 0.2 s, is a visible delay for a person who watches a print
"""The shortest time between two text messages, even if a program flushes after each character. A notebook that has to
handle a hundred thousand messages does not react to Stop."""
LOG_LIMIT = 64 << 20  # bytes of one rank's replay log, and of the file with its text; a new cell empties a larger file


@dataclass
class Capturing:
    """The messages that one cell has published so far."""

    cell: str
    count: int = 0
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class _PacedText:
    """Sends the text of stdout and stderr, flushed or not, in few messages and in order. Runs in ipykernel's thread.

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
        """Send the held text now, so that what is published next comes after it."""
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
class OutputCapture:
    """Wraps `session.send` of an engine. There is one object per process."""

    rank: int
    folder: Path
    stack: list[Capturing] = field(default_factory=list)
    last: str = ""
    starts: dict[str, int] = field(default_factory=dict)  # cell -> where its outputs begin in the replay log
    lock: threading.Lock = field(default_factory=threading.Lock)
    unkept: str = ""  # why outputs are not kept on disk now, such as a full disk

    def install(self, session: Any) -> None:
        """Put this object between everything that publishes and the socket."""
        self._send: Callable[..., Any] = session.send
        self._open()
        self.comms = RankComms(self._deliver, self._keep, self._mark)
        session.send = self.send
        self._paced = _PacedText((sys.stdout, sys.stderr))

        def plain() -> None:
            # A forked child (multiprocessing, DataLoader workers) has no thread that publishes and no count of its
            # own. Its text goes through the file descriptors, which this process reads.
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
        """Return stdout and stderr as they were when this process began."""
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
        """Flush, so that `capturing.count` is final. Later text of a thread goes to the log and is not counted."""
        self._paced.all()
        if self.unkept and len(self.stack) == 1:
            print(f"What this cell shows is not kept on disk: {self.unkept}", file=sys.stderr)
            self._paced.all()
        self.comms.settle()
        with self.lock:
            self.stack.remove(capturing)

    def send(self, stream: Any, msg_or_type: Any, content: Any = None, *rest: Any, **options: Any) -> Any:
        """Do what `Session.send` does, and put the cell's mark on outputs."""
        message = isinstance(msg_or_type, dict)
        kind = msg_or_type["msg_type"] if message else msg_or_type
        if kind == "status" and ((options.get("parent") or {}).get("metadata") or {}).get("nbkit") == "call":
            return None  # nobody waits for the busy and idle messages of nbkit's own calls, and each costs two hops
        if kind in ("execute_result", "error"):
            # Both are sent with the record that answers the cell, in one message instead of two.
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
        except UnicodeEncodeError:  # nothing was sent yet, and the notebook would wait for this message
            return self._send(stream, encodable(msg_or_type), encodable(content), *rest, **options)

    def publish(self, message: ForNotebook, stream: Any) -> None:
        """Send a message of nbkit to every notebook that listens."""
        self.send(stream, NEWS, encoded(message), metadata={"nbkit": {"rank": self.rank, "cell": "", "seq": -1}})

    def missed(self, cell: str, cursor: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Return outputs of `cell` as they were sent, about `limit` bytes of them, and the cursor for the next call.

        cursor: 0 for the cell's first output.
        """
        found: list[dict[str, Any]] = []
        with open(self.folder / f"rank{self.rank}.jsonl", encoding="utf-8") as log:
            start = cursor or self.starts.get(cell, 0)
            log.seek(start)
            while log.tell() - start < limit and (line := log.readline()).endswith("\n"):
                with suppress(ValueError):  # a line that was cut when the disk was full
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
        """Return the mark of a message that is not counted."""
        stack = self.stack
        return {"rank": self.rank, "cell": stack[-1].cell if stack else self.last, "seq": -1}

    def _write_text(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            with self.lock:
                self._write(self._text, content["text"])

    def _write(self, file: TextIO, text: str) -> None:
        """Write `text` to disk. If the disk is full, note it and go on.

        The message is still sent: otherwise the notebook would wait for it.
        """
        if self.unkept:
            return
        try:
            file.write(text)
            file.flush()
        except (OSError, ValueError) as error:
            self.unkept = str(error)

    def _keep_again(self) -> None:
        """Open the files again, since the disk may have room now. Readers skip a line that was cut."""
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
        """Empty files that are too large. Called before a cell: after one, a notebook may still ask for its outputs."""
        if self.unkept:
            return
        if self._replay.tell() > LOG_LIMIT and not self.stack:
            self._replay.seek(0)  # truncating does not move the position, from which `starts` is filled
            self._replay.truncate()
            self.starts.clear()
        if self._text.tell() > LOG_LIMIT and not self.stack:
            self._text.truncate(0)


def _open_private(path: Path) -> TextIO:
    return open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8", errors="backslashreplace"
    )


class _Autonotebook(types.ModuleType):
    """Replaces `tqdm.autonotebook`, from which tqdm.auto gets its bars: they are text. Imports tqdm on first use."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("tqdm", "trange"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("tqdm.std"), name)


def draw_as_text() -> None:
    """Draw bars of `tqdm.auto` as text from now on, in this process. A tqdm.auto imported before is unchanged."""
    sys.modules.setdefault("tqdm.autonotebook", _Autonotebook("tqdm.autonotebook", __doc__))
