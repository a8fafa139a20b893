"""The output of a cell that shows a widget: the widget, and a picture that only pages without the widget show.

A saved notebook has no kernel. For a widget without a kernel, a page shows "Error displaying widget" in place of the
whole output. So the picture is a separate output. It is updated while the widget lives, so that a notebook can be saved
at any moment.

This module also knows which kernels receive messages from pages during a cell, and the text to show for the others. The
tests are in docs/reference/views.md, "Clicks while a cell runs". The facts about VS Code come from bug reports.
For other cases, the page itself notices that a click is not answered.
"""

from __future__ import annotations

import html
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from nbkit.errors import NbkitError
from nbkit.notebook.cluster.registry import notebook_shell

DETACH = "%%distributed --detach"
_HEARS_PAGES = (7, 0)  # has subshells: a page's message need not wait for the running cell
_HEARS_NEW_PAGES = (7, 4)  # also a page without a subshell is heard while a cell awaits


def kernel_version() -> str:
    """Return the version of ipykernel, or "" if it is not installed."""
    try:
        import ipykernel
    except ImportError:
        return ""
    return str(ipykernel.__version__)


def in_vscode(environment: Mapping[str, str], variables: Mapping[str, Any]) -> bool:
    """Return True if VS Code shows the notebook, judged by environment variables and a Python variable that it sets.

    VSCODE_PID alone is not enough: on WSL and remote machines it is missing (holoviz/panel issue 5200).
    """
    return "__vsc_ipynb_file__" in variables or not environment.keys().isdisjoint(("VSCODE_PID", "VSCODE_CWD"))


def note_words(version: str, *, vscode: bool) -> str:
    """Return a note for a panel whose clicks have to wait for the running cell, else "". version: of ipykernel."""
    where = "VS Code" if vscode else f"ipykernel {version}" if version and _parts(version) < _HEARS_PAGES else ""
    if not where:
        return ""
    update = "" if vscode else ", or update ipykernel (pip install -U ipykernel) and restart the kernel"
    return f"With {where} the buttons act between cells: train with {DETACH} and they always answer{update}."


def lost_words(version: str, *, vscode: bool) -> str:
    """Return a note below the picture, for a page that is opened while a cell runs and gets the widget after the cell.

    Return "" if such a page gets the widget at once.
    """
    if vscode or not version or _parts(version) >= _HEARS_NEW_PAGES:
        return ""
    return (
        f"This is a picture. With ipykernel {version} a page that is opened while a cell runs gets the live one when "
        f"the cell is over. Train with {DETACH} and it is there at once, or update ipykernel "
        "(pip install -U ipykernel) and restart the kernel."
    )


def hear_always(comm: Any) -> None:
    """Make this kernel receive a page's messages even while a thread is busy.

    ipykernel 7.4 sends them to the thread that last used this comm, which may be busy.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def here() -> dict[str, Any]:
    """Return the arguments of `note_words` and `lost_words` for this kernel."""
    shell = notebook_shell()
    kernel = shell is not None and hasattr(shell, "kernel")
    variables = shell.user_ns if kernel else {}
    return {"version": kernel_version() if kernel else "", "vscode": in_vscode(os.environ, variables)}


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


class Shown(Protocol):
    """An object with a widget, or with None. still: returns the MIME bundle of its picture, which needs no kernel."""

    widget: Any

    def still(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def _repr_mimebundle_(self) -> dict[str, Any]: ...


STILL_SECONDS = 20.0
_LIVE = ":is(.nbkit-panel, .nbkit-dashboard, .nbkit-live)"
# Outputs of a cell in JupyterLab and Notebook 7, in nbclassic, and in VS Code.
_AREAS = ".jp-OutputArea, .output_wrapper, .cell_container"
_STYLE = (
    f"<style>:is({_AREAS}):has({_LIVE}) .nbkit-still, body:not(:has({_AREAS})):has({_LIVE}) .nbkit-still "
    "{ display: none }"
    # Hide the line of text that a widget without a kernel leaves.
    ":is(.jp-OutputArea):has(.nbkit-still) .jupyter-widgets:not(:has(*)) { display: none }</style>"
)
EMPTY = {"text/plain": ""}


def with_display_id(display_id: str) -> dict[str, Any]:
    """Return metadata for an output that is updated later: its display id, which a notebook file would not keep.

    JupyterLab does not update outputs of a reloaded page. nbkit's extension finds the output by this id and does it.
    """
    return {"nbkit_display_id": display_id}


def with_widget(still: dict[str, Any], widget: Any, **options: Any) -> dict[str, Any]:
    """Return a MIME bundle of the picture, for pages without widgets, and of the widget if it is not None."""
    return view_of(widget, **options) | still


def view_of(widget: Any, **options: Any) -> dict[str, Any]:
    """Return the MIME bundle of a widget alone; {} for None."""
    shown = (widget._repr_mimebundle_(**options) or {}) if widget is not None else {}
    # Some versions of ipywidgets give (bundle, metadata).
    bundle = dict(shown[0] if isinstance(shown, tuple) else shown)
    return {kind: data for kind, data in bundle.items() if kind != "text/plain"}


def beside_widget(still: dict[str, Any], words: str = "") -> dict[str, Any]:
    """Return the picture as a separate output. A page hides it while it shows a live widget of the same cell.

    words: a note below the picture, "" for none.
    """
    plain = still["text/plain"]
    page = still.get("text/html") or f"<pre>{html.escape(plain)}</pre>"
    said = html.escape(words).replace(DETACH, f"<code style='white-space: nowrap'>{DETACH}</code>")
    below = f"<p>{said}</p>" if words else ""
    text = f"{plain}\n\n{words}" if words else plain
    return {"text/plain": text, "text/html": f"{_STYLE}<div class='nbkit-still'>{page}{below}</div>"}


def display_until_stopped(shown: Shown, before_stop: list[Callable[[], object]] | None, words: str) -> None:
    """Display an object's widget and its picture. When its cluster is stopped, keep only the last picture.

    before_stop: the cluster's list of callbacks, None without a cluster. words: a note for a page without the widget,
    "" for none. Raises NotImplementedError outside of a kernel: IPython then displays the object in its usual way.
    """
    if getattr(notebook_shell(), "kernel", None) is None:
        raise NotImplementedError
    from IPython.display import display

    view = display(view_of(shown.widget), raw=True, display_id=True) if shown.widget is not None else None
    before = shown.still()
    name = f"nbkit-still-{uuid.uuid4().hex}"
    metadata = with_display_id(name)
    picture = display(beside_widget(before, words), metadata=metadata, raw=True, display_id=name)
    over = threading.Event()
    lock = threading.Lock()

    def show_newest(*, last: bool = False) -> None:
        nonlocal before
        with lock:
            if over.is_set():
                return
            still = shown.still()
            if last or still != before:
                picture.update(beside_widget(still, "" if last else words), metadata=metadata, raw=True)
            before = still
            if last:
                over.set()

    def leave_picture() -> None:
        show_newest(last=True)
        if view is not None:
            view.update(EMPTY, raw=True)
        shown.close()

    def keep_up() -> None:
        while not over.wait(STILL_SECONDS):
            if shown.widget is not None and shown.widget.comm is None:
                return
            with suppress(NbkitError, OSError):  # files that are being written
                show_newest()

    threading.Thread(target=keep_up, name="nbkit-still", daemon=True).start()
    if before_stop is not None:
        before_stop.append(leave_picture)
