"""Run a notebook without a browser: cell after cell in a new kernel. Each output is stored in the cell that sent it.

It is simpler than nbclient and differs from it: output of a detached cell is kept even if it arrives while later cells
run, and the kernel is always this Python. Widgets and input() are not supported.

`set_parameters` changes a notebook's parameters, the values of its first assignments, before it runs.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

from nbkit.errors import CellError, NbkitError, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.registry import Process
from nbkit.notebook.export.source import masked, place_of
from nbkit.notebook.user_files import uninterrupted
from nbkit.notebook.widgets.widget_output import EMPTY

Cell = dict[str, Any]
_READY_SECONDS = 120
_LONGEST_PATH = 90
"""Characters. A socket's path, which is ten characters longer, may have 107."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_notebook(path: Path) -> dict[str, Any]:
    """Return the notebook's JSON without outputs. Raises NbkitError if there is no notebook."""
    try:
        notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cells = notebook["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise NbkitError(f"{path.name} cannot be read.", numbers=why, hint="the path of a notebook") from None
    for cell in cells:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return notebook


def tagged(notebook: dict[str, Any], tag: str) -> list[Cell]:
    """Return the cells with the tag, in order."""
    return [cell for cell in notebook["cells"] if tag in cell["metadata"].get("tags", [])]


def text_of(cell: Cell) -> str:
    """Return a cell's printed text as a terminal would show it in the end, without colours."""
    printed = "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")
    return as_shown(printed)


def as_shown(printed: str) -> str:
    """Return printed text as a terminal would show it in the end, without colours."""
    return _ANSI.sub("", _overwritten(printed))


def shown_by(cell: Cell) -> str:
    """Return a cell's printed text, followed by the text of its last value."""
    values = ["".join(output["data"].get("text/plain", "")) for output in cell["outputs"] if "data" in output]
    return "\n".join(text for text in (text_of(cell), *values) if text)


class Headless:
    """A kernel of this Python. `with Headless(folder) as kernel: kernel.run(notebook)`.

    Leaving the block ends the kernel and every cluster that it has started. on_text: called with (cell, text) for each
    piece of printed text, even after the cell has ended.
    """

    def __init__(self, folder: Path, on_text: Callable[[Cell, str], None]) -> None:
        self.on_text = on_text
        self._cells: dict[str, Cell] = {}  # id of the message that executed it -> cell
        self._displays: dict[str, list[dict[str, Any]]] = {}
        self._log = tempfile.TemporaryFile()
        self._sockets = tempfile.TemporaryDirectory(prefix="nbkit-", ignore_cleanup_errors=True)
        where = os.path.join(self._sockets.name, "kernel.json")
        # Avoid TCP: its ports are chosen before the kernel opens them, and another program may take one meanwhile.
        transport = "ipc" if len(where) <= _LONGEST_PATH else "tcp"
        self._manager = KernelManager(kernel_spec_manager=_ThisPython(), connection_file=where, transport=transport)
        self._manager.start_kernel(cwd=str(folder), stdout=self._log, stderr=self._log)
        self._process = Process.of(self._manager.provisioner.pid)
        self._client = self._manager.blocking_client()

    def __enter__(self) -> Headless:
        try:
            self._client.start_channels()
            self._client.wait_for_ready(timeout=_READY_SECONDS)
        except BaseException as error:
            tail = self._log_tail()
            self.close()
            if isinstance(error, RuntimeError):
                raise NbkitError("The notebook kernel did not start.", numbers=tail, hint="nbkit doctor") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the kernel, then its clusters. Leave nothing running."""
        with uninterrupted():
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=True)
            self._log.close()
            self._sockets.cleanup()
            for entry in registry.entries():
                if entry.kernel == self._process:
                    registry.end(entry)

    def run(self, notebook: dict[str, Any], *, on_cell: Callable[[Cell], None] = lambda cell: None) -> None:
        """Execute the code cells and store their outputs in the notebook.

        on_cell: called with each cell before it runs. Raises CellError for the first one that fails; later cells do not
        run.
        """
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(code, 1):
            on_cell(cell)
            reply = self._execute(cell)
            cell["execution_count"] = reply.get("execution_count")
            if reply["status"] != "ok":
                shown = "\n".join([text_of(cell), *map(_plain, reply.get("traceback", []))]).strip().splitlines()
                first = next((line for line in "".join(cell["source"]).splitlines() if line.strip()), "")
                raise CellError(
                    f"Code cell {number} of the notebook failed: {first}", rank=0, numbers="\n".join(shown[-20:])
                )
        for cell in code:  # outputs of closed widgets; their pictures are separate outputs
            cell["outputs"] = [output for output in cell["outputs"] if output.get("data") != EMPTY]

    def _execute(self, cell: Cell) -> dict[str, Any]:
        """Run one cell. Return when its reply and all its output have arrived and the kernel is idle."""
        cell["outputs"] = []
        sent = self._client.execute("".join(cell["source"]), allow_stdin=False)
        self._cells[sent] = cell
        reply: dict[str, Any] | None = None
        idle = False
        while reply is None or not idle:
            try:
                message = self._client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                self._check_alive()
            else:
                idle |= self._take(message) == sent
            reply = reply or self._reply_to(sent)
        return reply

    def _reply_to(self, sent: str) -> dict[str, Any] | None:
        try:
            message = self._client.get_shell_msg(timeout=0)
        except queue.Empty:
            return None
        return dict(message["content"]) if message["parent_header"].get("msg_id") == sent else None

    def _take(self, message: dict[str, Any]) -> str:
        """Store an output in its cell. Return the id of the request that the message reports as finished, else ""."""
        parent = str(message["parent_header"].get("msg_id", ""))
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            return parent if content["execution_state"] == "idle" else ""
        cell = self._cells.get(parent)
        if cell is None:
            return ""
        outputs: list[dict[str, Any]] = cell["outputs"]
        if kind == "stream":
            _append(outputs, content["name"], content["text"])
            self.on_text(cell, content["text"])
        elif kind in ("display_data", "execute_result", "error"):
            transient = content.pop("transient", None) or {}
            outputs.append({"output_type": kind, **content})
            if "display_id" in transient:
                self._displays.setdefault(transient["display_id"], []).append(outputs[-1])
        elif kind == "update_display_data":
            for output in self._displays.get(content["transient"].get("display_id"), []):
                output.update(data=content["data"], metadata=content["metadata"])
        elif kind == "clear_output":
            outputs.clear()
        return ""

    def _check_alive(self) -> None:
        if not self._manager.is_alive():
            raise NbkitError("The notebook kernel has died.", numbers=self._log_tail(), hint="nbkit doctor")

    def _log_tail(self) -> str:
        # pread does not move the kernel's position in this file.
        size = os.fstat(self._log.fileno()).st_size
        return _plain(os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip())


class _ThisPython(KernelSpecManager):  # type: ignore[misc]
    """Knows only this Python's kernel. The name "python3" may belong to another environment of the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def _append(outputs: list[dict[str, Any]], name: str, text: str) -> None:
    """Append text to the last output of its stream. Text that a carriage return has overwritten is dropped."""
    if outputs and outputs[-1]["output_type"] == "stream" and outputs[-1]["name"] == name:
        outputs[-1]["text"] = _overwritten(outputs[-1]["text"] + text)
    else:
        outputs.append({"output_type": "stream", "name": name, "text": text})


def _overwritten(text: str) -> str:
    """Return the lines without text that `\\r` has overwritten. The last line may still be overwritten."""
    *complete, last = text.split("\n")
    lines = [_after_returns(line) for line in complete]
    ends_with_return = "\r" if last.endswith("\r") else ""
    return "\n".join([*lines, _after_returns(last) + ends_with_return])


def _after_returns(line: str) -> str:
    # A terminal overwrites from the left, so the end of a longer old text stays.
    shown = ""
    for piece in line.split("\r"):
        shown = piece + shown[len(piece) :]
    return shown.rstrip() if "\r" in line else line


def _plain(text: str) -> str:
    return _ANSI.sub("", text)


def set_parameters(notebook: dict[str, Any], given: Mapping[str, str]) -> None:
    """Replace the value in the first assignment to each name by the given text, as a literal of the same type.

    Search the cells with the tag `parameters`, or if there are none, all cells that run in the notebook itself. Keep
    comments. Raises UsageError for a name that is not assigned there, and for a value of another type.
    """
    cells = tagged(notebook, "parameters") or [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found: dict[str, tuple[dict[str, Any], ast.expr]] = {}
    for cell in cells:
        for name, value in _assignments("".join(cell["source"])):
            found.setdefault(name, (cell, value))
    for name in given:
        if name not in found:
            raise UsageError(
                f"The notebook has no parameter {name}.",
                numbers=f"it assigns: {', '.join(found) or 'nothing'}",
                hint=f"{name} = ...   in a cell tagged parameters",
            )
    # From the end, so that earlier places stay valid.
    for name, text in sorted(given.items(), key=lambda each: _start(found[each[0]][1]), reverse=True):
        cell, value = found[name]
        source = "".join(cell["source"])
        start = place_of(source, value.lineno, value.col_offset)
        end = place_of(source, value.end_lineno or value.lineno, value.end_col_offset or 0)
        cell["source"] = source[:start] + _literal(name, text, value) + source[end:]


def _start(value: ast.expr) -> tuple[int, int]:
    return value.lineno, value.col_offset


def _assignments(source: str) -> Iterator[tuple[str, ast.expr]]:
    try:
        tree = masked(source, "the cell").tree
    except UsageError:  # the cell fails when it runs, with a better message
        return
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                yield name, value
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                for target, value in zip(targets, values, strict=True):
                    if isinstance(target, ast.Name):
                        yield target.id, value


def _literal(name: str, text: str, before: ast.expr) -> str:
    """Return `text` as a literal of the old value's type: "500" becomes a number or a text, as the old value was."""
    try:
        old = ast.literal_eval(before)
    except ValueError:  # the old value is computed
        old = None
    if isinstance(old, str):
        return repr(text)
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text
    fits = old is None or type(value) is type(old) or (type(old) is float and type(value) is int)
    if not fits:
        raise UsageError(
            f"{name} is of another type.",
            numbers=f"{name}={text}; the notebook has {ast.unparse(before)}, of type {type(old).__name__}",
            hint=f"-p {name}={ast.unparse(before)}",
        )
    return repr(float(value) if type(old) is float else value)
