"""Adapts the IPython shell of a rank: exit() ends a cell, and an error within a magic fails the cell.

IPython shows the error of a script under %run, or of a cell under %%capture, and goes on. On ranks that is wrong: the
other ranks would wait for this one, and Run All would not stop. So the error is raised when the magic is over. The
script's variables are set by then, as always. Errors that are only shown (by a display, by an Output widget) are
output.

A warning names the line of the cell. ipykernel would name a file whose path contains the process.
"""

from __future__ import annotations

import functools
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

import IPython
import IPython.core.magics.execution
from ipykernel.zmqshell import ZMQExitAutocall

from nbkit.bridge.user_programs import as_first_program

MAGICS = (("line", "run"), ("cell", "capture"))  # magics that run code and show its error

FRAMES_SHOWN = (20, 40)
"""The number of outermost and innermost frames of an error that are shown. IPython searches all imported modules for
each frame, and with torch there are thousands: the thousand frames of a recursion took half a minute of a core."""

CAUSES_SHOWN = (3, 3)
"""The number of errors of a chain of causes that are shown: the newest ones, and those at its beginning."""

_MACHINERY = (str(Path(IPython.__file__).parent), __file__, "<frozen runpy>")

_PACKAGE = f"{Path(__file__).parents[1]}/"
_MODELS = f"{_PACKAGE}rank/models/"


class CellExit(SystemExit):
    """Raised by exit() and quit(): the cell ends here, and the rank lives on."""


class Exit(ZMQExitAutocall):  # type: ignore[misc]
    """`exit` and `quit`, in cells and in the scripts that they run."""

    def __call__(self, code: Any = None, *, keep_kernel: bool = False) -> None:
        """End the cell as Python's exit() ends a process. A code other than 0, or a message, fails the cell."""
        raise (CellExit if ends_well(SystemExit(code)) else SystemExit)(code)

    def __repr__(self) -> str:
        return "exit() ends a cell; %cluster stop, in the notebook, ends the ranks"


def ends_well(error: BaseException) -> bool:
    """Return True if `error` would end a process with exit code 0: sys.exit(), sys.exit(0), exit()."""
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


def end_words(error: BaseException) -> str:
    """Return the sentence about a cell that `error` has ended well."""
    how = "exit()" if isinstance(error, CellExit) else "sys.exit(0)"
    return f"{how} has ended the cell; the rank lives on. → %cluster stop ends the ranks"


class Shell:
    """The adapted IPython shell of a rank. There is one object per rank.

    outermost: the code that runs a cell. Frames below it on the stack do not belong to the cell.
    """

    def __init__(self, shell: Any, outermost: CodeType) -> None:
        self.shell, self._outermost = shell, outermost
        self._direct = False  # a magic of MAGICS runs, but not code that it has started
        self._failed: BaseException | None = None  # the error in that magic
        self._raised = 0  # id of the error that the last such magic raised
        self._run_cell, self._execfile = shell.run_cell, shell.safe_execfile
        self._new_main, shell.new_main_mod = shell.new_main_mod, self.new_main_mod
        self._show, self._publish = shell.showtraceback, shell._showtraceback
        shell.run_cell, shell.safe_execfile, shell.safe_run_module = self.run_cell, self.execfile, self.run_module
        shell.showtraceback, shell._showtraceback = self.show, self.publish
        self._skipped: dict[int, BaseException] = {}  # id of an error -> the next one that is shown of a long chain
        self._next = getattr(shell.InteractiveTB, "get_parts_of_chained_exception", None)
        if self._next is not None:
            shell.InteractiveTB.get_parts_of_chained_exception = self.cause_of
        for kind, name in MAGICS:
            shell.magics_manager.magics[kind][name] = self._failing(shell.find_magic(name, kind))
        shell.exiter = shell.ask_exit = Exit(shell)
        for names in (shell.user_ns, shell.user_ns_hidden, shell.builtin_trap.auto_builtins):
            names["exit"] = names["quit"] = shell.exiter
        # IPython's own hint after a SystemExit.
        warnings.filterwarnings("ignore", "To exit: use 'exit', 'quit', or Ctrl-D", UserWarning)
        self._formatted = warnings.formatwarning
        warnings.formatwarning = self.warned

    def _failing(self, magic: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(magic)
        def run(*args: Any, **options: Any) -> Any:
            outer = self._direct, self._failed
            self._direct, self._failed = True, None
            try:
                result = magic(*args, **options)
                if self._failed is not None:
                    raise self._failed
                return result
            except BaseException as error:
                self._raised = id(error)  # not the error itself: it keeps its frames alive
                raise
            finally:
                self._direct, self._failed = outer

        return run

    def run_cell(self, *args: Any, **options: Any) -> Any:
        """Call IPython's run_cell. If a magic called it, its error is the error of that magic."""
        direct, self._direct = self._direct, False
        try:
            result = self._run_cell(*args, **options)
        finally:
            self._direct = direct
        if direct and self._failed is None:
            self._failed = result.error_before_exec or result.error_in_exec
        return result

    def execfile(
        self,
        fname: Any,
        *where: Any,
        exit_ignore: bool = False,
        raise_exceptions: bool = False,
        shell_futures: bool = False,
    ) -> None:
        """Run a script like IPython's safe_execfile. Exit codes other than 0 are errors. An error fails the magic."""
        options = {"exit_ignore": exit_ignore, "raise_exceptions": True, "shell_futures": shell_futures}
        self._run_script(lambda: self._execfile(fname, *where, **options), exit_ignore, raise_exceptions)

    def new_main_mod(self, filename: str, modname: str) -> ModuleType:
        """Return IPython's module for a script, with a __spec__, as a script's module has. Spawned processes read it.

        IPython clears the module of a script that has run before, and with it the __spec__.
        """
        module: ModuleType = self._new_main(filename, modname)
        module.__spec__ = None
        return module

    def run_module(self, mod_name: str, where: dict[str, Any]) -> None:
        """Run a module like IPython's safe_run_module. Its error fails the magic."""
        self._run_script(lambda: where.update(runpy.run_module(mod_name, run_name="__main__", alter_sys=True)))

    def _run_script(self, run: Callable[[], object], exit_ignore: bool = False, raises: bool = False) -> None:
        direct, self._direct = self._direct, False
        try:
            with as_first_program():
                run()
        except BaseException as error:
            if ends_well(error) or (exit_ignore and isinstance(error, SystemExit)):
                return
            if raises or not direct:
                raise
            self._failed = error
        finally:
            self._direct = direct

    def show(
        self,
        exc_tuple: tuple[type[BaseException], BaseException, Any] | None = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Show a traceback like IPython, without IPython's frames between a cell and the script that it runs."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is not None and ends_well(error):
            return
        if isinstance(error, SystemExit) or (error is not None and id(error) == self._raised):
            exception_only = False
            error.__traceback__ = _of_the_user(error.__traceback__)
            exc_tuple = type(error), error, error.__traceback__
        if error is not None:
            self._skipped = _skipped(error)
            if (shown := _shortened(error)) is not None:
                exc_tuple = type(error), error, shown
        self._show(exc_tuple, filename, tb_offset, exception_only, running_compiled_code)

    def cause_of(self, error: BaseException | None) -> tuple[Any, BaseException, Any] | None:
        """Return IPython's get_parts_of_chained_exception, without the middle of long chains and tracebacks."""
        found = self._next(error) if self._next is not None else None
        if found is None:
            return None
        cause = self._skipped.get(id(error), found[1])
        return type(cause), cause, _shortened(cause) or cause.__traceback__

    def publish(self, etype: type[BaseException], evalue: BaseException, lines: list[str]) -> None:
        """Publish a traceback, depending on who shows it.

        The cell's own traceback is its failure. That of a magic is dropped: its error is raised when the magic is over.
        All others are printed as output.
        """
        shown_by = self.shown_by()
        if shown_by == "cell":
            self._publish(etype, evalue, lines)
        elif shown_by == "code":
            for stream in (sys.stdout, sys.stderr):  # keeps the order with other printed text
                stream.flush()
            print("\n".join(lines), file=sys.stderr, flush=True)

    def shown_by(self) -> str:
        """Return who shows a traceback, from the stack of the caller.

        "cell", "magic", or "code" (the user's code, which goes on).
        """
        for frame, _ in walk_stack(sys._getframe(2)):
            if frame.f_code is Shell.run_cell.__code__:
                return "magic" if frame.f_locals["direct"] else "code"
            if self.is_cell(frame):
                return "code"
            if frame.f_code is self._outermost:
                return "cell"
        return "code"

    def is_cell(self, frame: FrameType) -> bool:
        """Return True if the frame runs code of a cell."""
        return frame.f_code.co_filename in self.cells

    def warned(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Return the text of a warning. In a cell it names the line, as in a traceback, the same on every rank."""
        what = f"{category.__name__}: {message}\n"
        if (number := self.cells.get(filename)) is not None:
            return f"Cell In[{number}], line {lineno}: {what}"
        if filename.startswith(_PACKAGE):
            return what
        return self._formatted(message, category, filename, lineno, line)

    @property
    def cells(self) -> dict[str, int]:
        """The number of each cell, by the file name of its code."""
        return getattr(self.shell.compile, "_filename_map", {})


def _skipped(error: BaseException) -> dict[int, BaseException]:
    """Return where to cut the chain of an error, {} if it is short.

    {id of the last error before the gap: the first error after it}. A note on `error` says how many are left out.
    """
    chain: dict[int, BaseException] = {}
    while error is not None and id(error) not in chain:
        chain[id(error)] = error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)  # type: ignore[assignment]
    errors, (first, last) = [*chain.values()], CAUSES_SHOWN
    if len(errors) <= first + last:
        return {}
    errors[0].add_note(
        f"({len(errors) - first - last} of {len(errors)} errors of the chain are left out in the middle)"
    )
    return {id(errors[first - 1]): errors[-last]}


def _shortened(error: BaseException) -> TracebackType | None:
    """Return a traceback without nbkit's frames, and without its middle if it is long; None if nothing is left out.

    A cell calls nbkit, and nbkit calls the model or the loss. There may be twenty frames of nbkit between the two. They
    are shown only if nbkit's own code raised the error. A note on `error` counts the frames that are left out.
    """
    steps = _steps(error.__traceback__)
    own = [] if not steps or _is_ours(steps[-1]) else [step for step in steps[1:] if _is_ours(step)]
    kept = [step for step in steps if step not in own]
    if own:
        error.add_note(f"(frames of nbkit that are left out: {len(own)})")
    first, last = FRAMES_SHOWN
    if len(kept) > first + last:
        error.add_note(f"({len(kept) - first - last} of {len(kept)} frames are left out in the middle)")
        kept = [*kept[:first], *kept[-last:]]
    return _chain(kept) if len(kept) < len(steps) else None


def _is_ours(step: TracebackType) -> bool:
    """Return True if the frame runs code of nbkit, but not code of a model that nbkit contains."""
    filename = step.tb_frame.f_code.co_filename
    return filename.startswith(_PACKAGE) and not filename.startswith(_MODELS)


def _steps(traceback: TracebackType | None) -> list[TracebackType]:
    """Return the parts of a traceback, the outermost first."""
    steps = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    return steps


def _chain(steps: list[TracebackType]) -> TracebackType | None:
    """Return a traceback made of these steps, the outermost first."""
    made = None
    for step in reversed(steps):
        made = TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def _of_the_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without IPython's and nbkit's frames. The first is kept: IPython leaves it out itself."""
    steps = _steps(traceback)
    kept = [step for step in steps[1:] if not step.tb_frame.f_code.co_filename.startswith(_MACHINERY)]
    return _chain([*steps[:1], *kept])
