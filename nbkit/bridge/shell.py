"""Changes a rank's shell from a notebook's: exit() ends a cell, and what fails within a magic fails the cell.

A warning names the line of a cell, not the file that ipykernel says it is in, whose path has the process in it.

IPython shows the error of a script that %run runs, or of a cell under %%capture, and goes on. A rank that goes on
alone leaves the others waiting for it; and Run All would not stop. So the error is raised when the magic is over: the
script's variables are there, as ever. Errors that are shown and nothing more (by a display, by an Output widget) are
output.
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

MAGICS = (("line", "run"), ("cell", "capture"))  # those that run code and show its error

FRAMES_SHOWN = (20, 40)
"""Of the frames of an error the outermost and the innermost. IPython looks for the module of each among all that are
imported, and with torch there are thousands: the thousand frames of a recursion took it half a minute of a core."""

CAUSES_SHOWN = (3, 3)
"""Of a chain of errors, each the cause of the one before it, the newest and those that it began with."""

_MACHINERY = (str(Path(IPython.__file__).parent), __file__, "<frozen runpy>")

_PACKAGE = f"{Path(__file__).parents[1]}/"


class CellExit(SystemExit):
    """exit() or quit(): the cell ends here, and the rank lives on."""


class Exit(ZMQExitAutocall):  # type: ignore[misc]
    """`exit` and `quit`, in cells and in the scripts that they run."""

    def __call__(self, code: Any = None, *, keep_kernel: bool = False) -> None:
        """As Python's own, for the cell: a code that is not 0, or a message, fails it."""
        raise (CellExit if ends_well(SystemExit(code)) else SystemExit)(code)

    def __repr__(self) -> str:
        return "exit() ends a cell; %cluster stop, in the notebook, ends the ranks"


def ends_well(error: BaseException) -> bool:
    """Return True if a process that it ends would say that all is well: sys.exit(), sys.exit(0), exit()."""
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


def end_words(error: BaseException) -> str:
    """Return what is said of a cell that `error` has ended well."""
    how = "exit()" if isinstance(error, CellExit) else "sys.exit(0)"
    return f"{how} has ended the cell; the rank lives on. → %cluster stop ends the ranks"


class Shell:
    """One per rank. outermost: the code of what runs a cell; what is below it on the stack is not the cell's."""

    def __init__(self, shell: Any, outermost: CodeType) -> None:
        self.shell, self._outermost = shell, outermost
        self._direct = False  # a magic of MAGICS runs, and no code that it has started
        self._failed: BaseException | None = None  # in it
        self._raised = 0  # by one that is over
        self._run_cell, self._execfile = shell.run_cell, shell.safe_execfile
        self._new_main, shell.new_main_mod = shell.new_main_mod, self.new_main_mod
        self._show, self._publish = shell.showtraceback, shell._showtraceback
        shell.run_cell, shell.safe_execfile, shell.safe_run_module = self.run_cell, self.execfile, self.run_module
        shell.showtraceback, shell._showtraceback = self.show, self.publish
        self._skipped: dict[int, BaseException] = {}  # id of an error -> what is shown after it of a long chain
        self._next = getattr(shell.InteractiveTB, "get_parts_of_chained_exception", None)
        if self._next is not None:
            shell.InteractiveTB.get_parts_of_chained_exception = self.cause_of
        for kind, name in MAGICS:
            shell.magics_manager.magics[kind][name] = self._failing(shell.find_magic(name, kind))
        shell.exiter = shell.ask_exit = Exit(shell)
        for names in (shell.user_ns, shell.user_ns_hidden, shell.builtin_trap.auto_builtins):
            names["exit"] = names["quit"] = shell.exiter
        # IPython's own advice after a SystemExit.
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
                self._raised = id(error)  # not itself: it holds what its frames hold
                raise
            finally:
                self._direct, self._failed = outer

        return run

    def run_cell(self, *args: Any, **options: Any) -> Any:
        """IPython's own; its error is the magic's that has called it."""
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
        """IPython's safe_execfile, which shows an error and returns; exit codes other than 0 are errors."""
        options = {"exit_ignore": exit_ignore, "raise_exceptions": True, "shell_futures": shell_futures}
        self._run_script(lambda: self._execfile(fname, *where, **options), exit_ignore, raise_exceptions)

    def new_main_mod(self, filename: str, modname: str) -> ModuleType:
        """IPython's own, with the __spec__ that a script's module has: a process that is spawned reads it.

        IPython clears the module of a script that has run before, and with it the __spec__.
        """
        module: ModuleType = self._new_main(filename, modname)
        module.__spec__ = None
        return module

    def run_module(self, mod_name: str, where: dict[str, Any]) -> None:
        """IPython's safe_run_module, the same."""
        self._run_script(lambda: where.update(runpy.run_module(mod_name, run_name="__main__", alter_sys=True)))

    def _run_script(self, run: Callable[[], object], exit_ignore: bool = False, raises: bool = False) -> None:
        direct, self._direct = self._direct, False
        try:
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
        """IPython's showtraceback, without its own frames between a cell and the script that it runs."""
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
        """As IPython's get_parts_of_chained_exception, without the middle of a long chain and of a long traceback."""
        found = self._next(error) if self._next is not None else None
        if found is None:
            return None
        cause = self._skipped.get(id(error), found[1])
        return type(cause), cause, _shortened(cause) or cause.__traceback__

    def publish(self, etype: type[BaseException], evalue: BaseException, lines: list[str]) -> None:
        """Of a traceback: the cell's own is its failure, that of a magic is raised in a moment, others are output."""
        shown_by = self.shown_by()
        if shown_by == "cell":
            self._publish(etype, evalue, lines)
        elif shown_by == "code":
            for stream in (sys.stdout, sys.stderr):  # each in its place among what is printed
                stream.flush()
            print("\n".join(lines), file=sys.stderr, flush=True)

    def shown_by(self) -> str:
        """Return what has called the caller, to show a traceback: "cell", "magic", or "code" of the user's that goes
        on."""
        for frame, _ in walk_stack(sys._getframe(2)):
            if frame.f_code is Shell.run_cell.__code__:
                return "magic" if frame.f_locals["direct"] else "code"
            if self.is_cell(frame):
                return "code"
            if frame.f_code is self._outermost:
                return "cell"
        return "code"

    def is_cell(self, frame: FrameType) -> bool:
        """Return True if its code is a cell's own."""
        return frame.f_code.co_filename in self.cells

    def warned(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Return what a warning looks like: of a cell with its own lines, as in a traceback, and on every rank
        alike."""
        what = f"{category.__name__}: {message}\n"
        if (number := self.cells.get(filename)) is not None:
            return f"Cell In[{number}], line {lineno}: {what}"
        if filename.startswith(_PACKAGE):
            return what
        return self._formatted(message, category, filename, lineno, line)

    @property
    def cells(self) -> dict[str, int]:
        """The number of each cell, by the file that its code is said to be in."""
        return getattr(self.shell.compile, "_filename_map", {})


def _skipped(error: BaseException) -> dict[int, BaseException]:
    """Return where the chain of an error is long: the last that is shown of its newest -> the first that is shown after
    it.

    How many are left out is counted in a note.
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
    """The traceback of an error without its middle, which is counted in a note; None where it is short."""
    steps, traceback = [], error.__traceback__
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    first, last = FRAMES_SHOWN
    if len(steps) <= first + last:
        return None
    error.add_note(f"({len(steps) - first - last} of {len(steps)} frames are left out in the middle)")
    return _chain([*steps[:first], *steps[-last:]])


def _chain(steps: list[TracebackType]) -> TracebackType | None:
    """Return a traceback of these steps, the outermost first."""
    made = None
    for step in reversed(steps):
        made = TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def _of_the_user(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without IPython's frames and ours, but for the first, which IPython leaves out itself."""
    steps = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    kept = [step for step in steps[1:] if not step.tb_frame.f_code.co_filename.startswith(_MACHINERY)]
    return _chain([*steps[:1], *kept])
