"""Runs cells on a rank, in the main thread, one at a time. Live cells nest inside the cell that trains.

A cell runs in the engine's own IPython shell, so magics, `!commands`, top-level await and rich display work as in a
notebook. `Runner` adds four things: the record that goes back, the notebook's own cell number in tracebacks, an event
loop for await (the engine's loop is busy with the request itself), and a stop that only interrupts the user's code.

An interrupt waits while an installed module is being imported. An interrupted import cannot be repeated: extension
modules load once in a process, and a half-imported package behaves differently the second time. A module of the user
may contain a whole training, so its import is interrupted at once.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, TypeVar

from IPython.core.displayhook import DisplayHook

from nbkit.bridge.debugger import Debugger, Prompts
from nbkit.bridge.output import OutputCapture, shortened
from nbkit.bridge.shell import Shell, end_words, ends_well
from nbkit.device_kinds import CPU
from nbkit.errors import Stopped
from nbkit.figures import size
from nbkit.rank.comm import delegating_group
from nbkit.rank.device import accelerator
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.control.step_boundary import DETACHED
from nbkit.rank.train.step.failure import PEER_GONE
from nbkit.rank.world import meeting, world
from nbkit.wire import interrupts
from nbkit.wire.cells import CellRecord, CellRequest, Failure, Status
from nbkit.wire.link import Link
from nbkit.wire.messages import CellBegan, CellEnded, ForNotebook, ForParent, ForRank
from nbkit.wire.text_encoding import encodable

LONGEST_S = 60.0  # an import that takes longer is interrupted: it hangs, or runs something else
_LOOKED_S = 0.02

_IMPORTS = "<frozen importlib._bootstrap>"
_STDLIB = Path(sysconfig.get_path("stdlib"))


def is_importing(frame: FrameType | None) -> bool:
    """Return True if `frame` is part of the import of an installed module, or of a module of Python itself."""
    body = ""
    for each, _ in walk_stack(frame):
        code = each.f_code
        if code.co_filename == _IMPORTS and code.co_name == "_find_and_load":
            if not body or _is_installed(body):
                return True
            body = ""
        elif code.co_name == "<module>":
            body = code.co_filename
    return False


def when_imported(interrupt: Callable[[], None], wanted: Callable[[], bool]) -> None:
    """Call `interrupt` from a thread as soon as the main thread imports no installed module.

    Repeat it while `wanted()`. After LONGEST_S seconds, call it even during an import.
    """
    main, until = threading.main_thread().ident or 0, time.monotonic() + LONGEST_S

    def wait() -> None:
        while wanted():
            if time.monotonic() >= until or not is_importing(sys._current_frames().get(main)):
                interrupt()
            time.sleep(_LOOKED_S)

    threading.Thread(target=wait, name="nbkit-when-imported", daemon=True).start()


def _is_installed(file: str) -> bool:
    path = Path(file)
    return (
        file.startswith("<frozen")
        or {"site-packages", "dist-packages"} & {*path.parts} != set()
        or path.is_relative_to(_STDLIB)
    )


TEXT_SECONDS = 20.0  # to make the text of an error, perhaps by the user's code, while the other ranks wait
PATIENCE_SECONDS = 1.0  # before a stop may interrupt that
AGAIN_SECONDS = 0.5
VALUE_LIMIT = 64 << 10  # characters of repr; larger values are pulled, not returned
RECORDS_KEPT = 50
_OWN_SIGNAL = signal.SIGURG  # replaces SIGINT when user code handles SIGINT; programs do not handle SIGURG


T = TypeVar("T")


class _TextInterrupted(BaseException):
    """Raised to end the code that makes the text of an error."""


@dataclass
class Running:
    """A cell that runs now.

    released: why this rank has to end the cell, such as "rank 1 failed". asked: True if the user wants the cell to
    stop. stopped: True if it was interrupted for that. saved, saved_step: path and step of the newest checkpoint, if an
    error has ended a training in the cell.
    """

    request: CellRequest
    started: float
    released: str = ""
    asked: bool = False
    stopped: bool = False
    saved: str = ""
    saved_step: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class Runner:
    """Runs the cells of a rank. There is one object per rank."""

    def __init__(self, shell: Any, capture: OutputCapture, link: Link[ForParent, ForRank], rank: int) -> None:
        self.shell, self.capture, self.link, self.rank = shell, capture, link, rank
        self.running: list[Running] = []
        self.stopped_early: set[str] = set()  # cells that were stopped before they began
        self.records: OrderedDict[str, CellRecord] = OrderedDict()
        self.requests: dict[str, CellRequest] = {}  # for the records that are kept
        self.in_user_code = False
        self.serving: Running | None = None  # a call from the notebook that runs user code, but is not a cell
        self._text_begun = 0.0  # when code began to make the text of an error; 0 if none does
        self._elsewhere: set[int] = set()  # GPUs of other ranks on which tensors of this rank were found
        self._untold: tuple[int, str] = (0, "")  # (id of an error whose text could not be made, why)
        self.target: Running | None = None  # the cell for which an interrupt is on its way
        self._held: tuple[Running, float] | None = None  # (cell whose interrupt waits for an import, since when)
        self.loop = asyncio.new_event_loop()
        builtins.input = _no_keyboard
        # If sys.ps1 exists, programs think that the process is interactive: Lightning then refuses ddp.
        vars(sys).pop("ps1", None)
        self.own = Shell(shell, Runner._execute.__code__)
        self.prompts = Prompts(rank, self._publish, lambda: self.running[-1].request.id if self.running else "")
        self.debugger = Debugger(self.prompts, self.own, Runner._execute.__code__)
        self.debugger.install()
        self._show_traceback = shell.showtraceback
        shell.showtraceback = self._showing_traceback
        # Replace the hooks for good: a signal at the end of a cell must not find a handler that raises in nbkit's code.
        shell.kernel.pre_handler_hook = shell.kernel.post_handler_hook = lambda: None
        self._hear_interrupts()

    def run(self, request: CellRequest, enters: ast.NodeTransformer | None = None, remark: str = "") -> CellRecord:
        """Run a cell to its end, and return how it ended.

        enters: reduces the cell to the part that a late rank runs. remark: a text to print first.
        """
        running = Running(request, time.time())
        with self.shielded():
            self.running.append(running)
            outer = DETACHED.set(request.detached)
            try:
                return self._run(running, enters, remark)
            finally:
                self._untold = 0, ""
                DETACHED.reset(outer)
                running.ended.set()
                self.running.remove(running)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Allow no interrupt inside, except in the user's code.

        A live cell runs within a cell that may be interrupted.
        """
        outer, self.in_user_code = self.in_user_code, False
        try:
            yield
        finally:
            self.in_user_code = outer

    def interrupt(self, running: Running, *, insist: bool = False) -> None:
        """Raise KeyboardInterrupt in the main thread, if that runs user code and `running` has not ended.

        insist: do so even if the cell has blocked SIGINT, or has its own handler (which was called before). Any thread
        may call this.
        """
        self.target = running
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, _OWN_SIGNAL if insist else signal.SIGINT)

    def _hear_interrupts(self) -> None:
        """Install the handlers for interrupts again. This removes a SIGINT handler that a cell has set."""
        for number in (signal.SIGINT, _OWN_SIGNAL):
            signal.signal(number, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, _OWN_SIGNAL))

    @contextmanager
    def open_to_stop(self) -> Iterator[None]:
        """Let Stop interrupt the code inside. It is user code that is not a cell, such as code that pickles a value."""
        self.serving = serving = Running(CellRequest("", "", 0, ()), time.time())
        self._untold = 0, ""
        self._hear_interrupts()
        try:
            try:
                self.in_user_code = True
                yield
            finally:
                self.in_user_code = False
        finally:
            serving.ended.set()
            self.serving = None

    def stoppable(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return `handler` in a form that Stop can interrupt. It passes messages of pages to widgets: user code."""

        def handle(*message: Any) -> Any:
            try:
                with self.open_to_stop():
                    return handler(*message)
            except KeyboardInterrupt:
                print("The code of a widget was stopped.", file=sys.stderr)

        return handle

    def _run(self, running: Running, enters: ast.NodeTransformer | None, remark: str) -> CellRecord:
        request = running.request
        if len(self.running) == 1:  # not for a live cell: the cell around it may have set a handler
            self._hear_interrupts()
        if not request.post_mortem:
            self.debugger.begin()
        capturing = self.capture.begin(request.id)
        # With `ranks` the parent can release a cell that begins after one of its ranks has died.
        self.link.send(CellBegan(request.id, request.ranks))
        status: Status = "error"
        if len(self.running) == 1:
            meeting.begin_cell(request.id, request.ranks)
        try:
            if remark:
                print(remark, file=sys.stderr)
            with self._entering(enters):
                result, escaped = self._attempt(request)
            self.debugger.end()
            error = escaped or (result and (result.error_before_exec or result.error_in_exec))
            failure = self._failure(running, error, capturing.error)
            status = _status(failure, running)
            self._let_go(running, error, failure, status)
            self._name_tensors_elsewhere()
        finally:
            # Tell the parent of a failure before anything else, since it releases the ranks that wait for this one.
            self.link.send(CellEnded(request.id, status))
            if len(self.running) == 1:
                meeting.end_cell(finished=status == "ok")
            running.ended.set()
            self.prompts.refuse(request.id)  # threads that outlive the cell must not wait for an answer
            for stream in (sys.stdout, sys.stderr):
                if all(stream is not own for own in self.capture.streams):  # the user has replaced the stream
                    with suppress(BaseException):
                        self._told(stream.flush)
            self.capture.end(capturing)
        here = world.current()
        record = CellRecord(
            cell=request.id,
            rank=self.rank,
            generation=here.generation if here else 0,
            status=status,
            seconds=time.time() - running.started,
            outputs=capturing.count,
            value=_plain(getattr(result, "result", None)),
            bundle=None if _is_muted(request.source) else capturing.result,
            failure=failure,
            dirty=here.dirty if here else "this rank has no world",
            counts=delegating_group.fingerprint(),
        )
        self.records[request.id], self.requests[request.id] = record, request
        while len(self.records) > RECORDS_KEPT:
            self.requests.pop(self.records.popitem(last=False)[0])
        return record

    def _name_tensors_elsewhere(self) -> None:
        """Print, once for each GPU, that this rank has tensors on the GPU of another rank."""
        here = world.current()
        if here is None or here.place.device == CPU:
            return
        kind, own = here.place.device, here.place.local_rank
        for index, held in accelerator().elsewhere(own).items():
            if index not in self._elsewhere:
                self._elsewhere.add(index)
                print(
                    f"nbkit: rank {self.rank} has {size(held)} of tensors on {kind}:{index}, the GPU of "
                    f"rank {self.rank - own + index}. Its own is {kind}:{own}; in cells: device",
                    file=sys.stderr,
                )

    @contextmanager
    def _entering(self, enters: ast.NodeTransformer | None) -> Iterator[None]:
        if enters is None:
            yield
            return
        self.shell.ast_transformers.append(enters)
        try:
            yield
        finally:
            self.shell.ast_transformers.remove(enters)

    def _attempt(self, request: CellRequest) -> tuple[Any, BaseException | None]:
        """Return (the shell's result of the cell, None), or (None, error) if the shell has not caught the error.

        Such an error is SystemExit, or an interrupt that came outside of the shell's handlers.
        """
        shell = self.shell
        outer = shell.execution_count, shell.displayhook.exec_result  # of the cell around a live cell
        try:
            try:
                self.in_user_code = True
                return self._execute(request), meeting.unheard()
            finally:
                self.in_user_code = False
        except BaseException as error:
            self.in_user_code = False
            return None, error
        finally:
            shell.execution_count, shell.displayhook.exec_result = outer
            # IPython keeps the outputs of every cell, including pictures, to write notebooks.
            getattr(shell.history_manager, "outputs", {}).clear()

    def _execute(self, request: CellRequest) -> Any:
        shell = self.shell
        if request.id in self.stopped_early:
            self.running[-1].stopped = True
            raise KeyboardInterrupt
        if request.post_mortem:
            return self.debugger.post_mortem()
        shell.execution_count = request.number
        # Turn cell magics and `!` into Python. An error in this is shown as an error of the cell.
        try:
            transformed, broken = shell.transform_cell(request.source), None
        except Exception:
            transformed, broken = request.source, sys.exc_info()
        coroutine = shell.run_cell_async(
            request.source, store_history=False, transformed_cell=transformed, preprocessing_exc_tuple=broken
        )
        awaits = shell.should_run_async(request.source, transformed_cell=transformed, preprocessing_exc_tuple=broken)
        with _no_running_loop():
            return self._await(coroutine) if awaits else _to_its_end(coroutine)

    def _await(self, coroutine: Any) -> Any:
        """Run a cell with await to its end. A live cell gets its own loop if the cell around it awaits too."""
        loop = asyncio.new_event_loop() if self.loop.is_running() else self.loop
        try:
            task = loop.create_task(coroutine)
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                task.cancel()
                return loop.run_until_complete(task)
        finally:
            if loop is not self.loop:
                loop.close()

    def _on_sigint(self, signum: int, frame: types.FrameType | None) -> None:
        # An interrupt for a live cell may come after that cell has ended. It must not interrupt the training.
        target, self.target = self.target, None
        meant = None if target else interrupts.meant_for(self.capture.folder, self.rank)
        if meant is not None:
            target = next((running for running in self.running if running.request.id == meant), None)
            if target is None:
                return
            target.stopped = True
        if target is not None and target.ended.is_set():
            return
        if self._text_begun:
            if time.monotonic() - self._text_begun > PATIENCE_SECONDS and not is_importing(frame):
                raise _TextInterrupted
            return
        if self.in_user_code:
            if is_importing(frame) and self._waits_for_import(target or self.serving or self.running[-1]):
                return
            self._held = None
            raise KeyboardInterrupt

    def _waits_for_import(self, running: Running) -> bool:
        """Interrupt `running` when its import has ended. Returns False if the import has taken too long already."""
        if self._held is None or self._held[0] is not running:
            held = self._held = running, time.monotonic()
            when_imported(lambda: self.interrupt(running), lambda: self._held is held and not running.ended.is_set())
        return time.monotonic() < self._held[1] + LONGEST_S

    def _showing_traceback(self, *args: Any, **kwargs: Any) -> None:
        """Show a traceback. A late interrupt does not disturb this.

        A rank that ends because another one failed shows nothing here: its user sees only one line of it, and IPython
        takes a second of CPU time to make the traceback. The text of an error comes from its own code, which may exit
        or never end. Then the frames are shown without that text.
        """
        was, self.in_user_code = self.in_user_code, False
        given = args[0] if args else kwargs.get("exc_tuple")
        error = given[1] if given else sys.exc_info()[1]
        try:
            if self.running and self.running[-1].released.startswith("rank ") and self.own.shown_by() == "cell":
                return
            try:
                self._told(lambda: self._show_traceback(*args, **kwargs))
            except BaseException as why:
                if error is None:
                    raise
                self._untold = id(error), _unsaid(why)
                stand_in = type(type(error).__name__, (Exception,), {})(self._untold[1])
                with suppress(BaseException):
                    self._told(lambda: self._show_traceback((type(stand_in), stand_in, error.__traceback__)))
        finally:
            self.in_user_code = was and self._within_cell()

    def _told(self, make: Callable[[], T]) -> T:
        """Return make(), which calls code of the user's objects to get their text.

        Raises the errors of that code, and _TextInterrupted if it is stopped or takes longer than TEXT_SECONDS.
        """
        limit = Running(CellRequest("", "", 0, ()), time.time())
        threading.Thread(target=self._limit, args=(limit,), name="nbkit-text", daemon=True).start()
        try:
            try:
                self._text_begun = time.monotonic()
                return make()
            finally:
                self._text_begun = 0.0
        finally:
            self._text_begun = 0.0  # an interrupt may have come just before
            limit.ended.set()

    def _limit(self, limit: Running) -> None:
        seconds = TEXT_SECONDS
        while not limit.ended.wait(seconds):
            self.interrupt(limit, insist=True)
            seconds = AGAIN_SECONDS

    def _within_cell(self) -> bool:
        """Return True if code of the innermost cell still runs.

        `%run` shows the error of a script, and the cell goes on.
        """
        for frame, _ in walk_stack(sys._getframe()):
            if frame.f_code is Runner._execute.__code__:
                return False
            if self.own.is_cell(frame):
                return True
        return False

    def _publish(self, message: ForNotebook) -> None:
        self.capture.publish(message, self.shell.kernel.iopub_socket)

    def _failure(self, running: Running, error: BaseException | None, shown: dict[str, Any] | None) -> Failure | None:
        if error is None or ends_well(error):
            # An error that was shown but did not end the cell is output.
            words = [*(shown["traceback"] if shown else ()), *([end_words(error)] if error else ())]
            if words:
                print("\n".join(words), file=sys.stderr)
            return None
        saved, step = (running.saved, running.saved_step) if running.saved else _newest_checkpoint()
        said = self.said(error)
        return Failure(
            ename=type(error).__name__,
            stopped=isinstance(error, Stopped),
            evalue=said,
            traceback=tuple(shown["traceback"]) if shown else (f"{type(error).__name__}: {said}",),
            moment=time.time(),
            line=self._line(error),
            where=delegating_group.where().partition(", issued")[0],
            saved=saved,
            saved_step=step,
            device_lost="" if self._is_untold(error) else accelerator().context_lost(error),
        )

    def said(self, error: BaseException) -> str:
        """Return the text of an error, in a form that can be sent. The error's own code makes it."""
        if not self._is_untold(error):
            try:
                return self._told(lambda: shortened(str(encodable(str(error)))))
            except BaseException as why:
                self._untold = id(error), _unsaid(why)
        return self._untold[1]

    def _is_untold(self, error: BaseException) -> bool:
        return self._untold[0] == id(error)

    def _let_go(self, running: Running, error: BaseException | None, failure: Failure | None, status: Status) -> None:
        """Drop the frames of an error, except those that `%nbkit debug` may show before the next cell begins.

        Frames of a live cell are always dropped, since a training goes on after it. So are frames of an out-of-memory
        error, since they hold the memory.
        """
        if error is None or failure is None:
            return
        lacks_memory = not self._is_untold(error) and accelerator().out_of_memory(error)
        if status == "error" and len(self.running) == 1 and not lacks_memory:
            self.debugger.keep(
                running.request.number, f"{failure.ename}: {failure.evalue}", failure.moment, error.__traceback__
            )
        # IPython and its traceback printer keep the last exception, and so every tensor in its frames.
        self.shell.InteractiveTB.tb = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                setattr(sys, name, None)
        error.__traceback__ = None

    def _line(self, error: BaseException) -> int:
        """Return the line of the cell that led to the error: the innermost frame that is cell code."""
        lines = [line for frame, line in walk_tb(error.__traceback__) if self.own.is_cell(frame)]
        return lines[-1] if lines else 0


def _newest_checkpoint() -> tuple[str, int]:
    """Return path and step of the newest checkpoint of this process's training, or ("", 0)."""
    last = getattr(getattr(step_boundary.newest(), "saves", None), "last", None)
    return ("", 0) if last is None or last.path is None else (str(last.path), last.step)


@contextmanager
def _no_running_loop() -> Iterator[None]:
    """Hide the engine's running event loop from the code inside, which may start its own loop."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None:
            asyncio.set_event_loop(outer)  # asyncio.run() leaves no loop set


def _to_its_end(coroutine: Any) -> Any:
    """Run a cell without await to its end, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a cell without await tried to wait")


def _status(failure: Failure | None, running: Running) -> Status:
    if failure is None:
        return "ok"
    if running.stopped or failure.stopped:
        return "interrupted"
    if running.released or any(sign in failure.evalue for sign in PEER_GONE):
        return "released"
    return "error"  # also for a KeyboardInterrupt of the user's code or from a signal: the others wait for this rank


def _unsaid(why: BaseException) -> str:
    """Return a text that replaces the text of an error. why: the error in making it."""
    if isinstance(why, _TextInterrupted):
        return "(its text takes too long to make, or was stopped)"
    return f"(its text cannot be made: {type(why).__name__})"


def _is_muted(source: str) -> bool:
    """Return True if a semicolon at the end hides the last value, as in any notebook."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(source))
    except (SyntaxError, tokenize.TokenError):  # not Python, such as a `!command`
        return False


def _plain(value: Any) -> Any:
    """Return `value` if it is small plain data, else None: the notebook has to read it without torch."""
    if type(value) in (str, bytes) and len(value) > VALUE_LIMIT:
        return None
    try:
        return value if _is_plain(value) and len(repr(value)) <= VALUE_LIMIT else None
    except RecursionError:  # it contains itself, or is very deep
        return None


def _is_plain(value: Any) -> bool:
    if type(value) in (int, float, str, bool, bytes, complex, type(None)):
        return True
    if type(value) in (list, tuple, set):
        return len(value) < 10_000 and all(map(_is_plain, value))
    if type(value) is dict:
        return len(value) < 10_000 and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return False


def _no_keyboard(prompt: object = "") -> str:
    __tracebackhide__ = True
    raise RuntimeError(
        "input() was called on a rank, and ranks have no keyboard. "
        "Ask in a cell of the notebook itself, then send the answer: answer = input(); then %push answer"
    )
