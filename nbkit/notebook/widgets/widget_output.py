"""The output of a cell that shows a widget: the widget while its cluster is there, then a picture of it.

A saved notebook has no kernel: a page there says "Error displaying widget", whatever else the output holds.

This module also tells whether a kernel hears its pages during a cell, or on a page opened then, and what to say if it
does not. What was tried is in docs/reference/measurements.md, "Where the panel answers". What is known of VS Code is
from reports.
If neither source covers a case, the page itself notices that a click is not heard.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nbkit.notebook.cluster.registry import notebook_shell

DETACH = "%%distributed --detach"
_HEARS_PAGES = (7, 0)  # it has subshells: what a page says while a cell runs need not wait for the cell
_HEARS_NEW_PAGES = (7, 4)  # and, while a cell awaits, what a page says that has no subshell yet


def kernel_version() -> str:
    """Return the version of ipykernel; "" where there is none."""
    try:
        import ipykernel
    except ImportError:
        return ""
    return str(ipykernel.__version__)


def in_vscode(environment: Mapping[str, str], variables: Mapping[str, Any]) -> bool:
    """Return True if VS Code shows the notebook: by what it sets for its kernels, and the variable that it puts into
    them.

    VSCODE_PID alone is not enough: on WSL and remote machines it is missing (holoviz/panel issue 5200).
    """
    return "__vsc_ipynb_file__" in variables or not environment.keys().isdisjoint(("VSCODE_PID", "VSCODE_CWD"))


def note_words(version: str, *, vscode: bool) -> str:
    """Said in a panel whose clicks wait while a cell runs; "" where they do not. version: of ipykernel."""
    where = "VS Code" if vscode else f"ipykernel {version}" if version and _parts(version) < _HEARS_PAGES else ""
    if not where:
        return ""
    update = "" if vscode else ", or update ipykernel (pip install -U ipykernel) and restart the kernel"
    return f"With {where} the buttons act between cells: train with {DETACH} and they always answer{update}."


def lost_words(version: str, *, vscode: bool) -> str:
    """Said below a widget that a page opened while a cell runs does not get before the cell is over; else ""."""
    if vscode or not version or _parts(version) >= _HEARS_NEW_PAGES:
        return ""
    return (
        f"Nothing above? With ipykernel {version} a page that is opened while a cell runs gets this when the cell is "
        f"over. Train with {DETACH} and it is there at once, or update ipykernel "
        "(pip install -U ipykernel) and restart the kernel."
    )


def hear_always(comm: Any) -> None:
    """Make this kernel hear a page's messages even while a thread is busy.

    ipykernel 7.4 sends them to the thread that last used this comm, which may be a busy one.
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
    """An object that has a widget. still: returns the MIME bundle of its picture, which needs no kernel."""

    def still(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def _repr_mimebundle_(self) -> dict[str, Any]: ...


def with_widget(still: dict[str, Any], widget: Any, **options: Any) -> dict[str, Any]:
    """Return a MIME bundle: the picture for pages and notebooks without widgets, and the widget where it is not
    None."""
    shown = (widget._repr_mimebundle_(**options) or {}) if widget is not None else {}
    # Some versions of ipywidgets give (bundle, metadata).
    return dict(shown[0] if isinstance(shown, tuple) else shown) | still


def display_until_stopped(shown: Shown, before_stop: list[Callable[[], object]] | None, words: str) -> None:
    """Display an object that has a widget; when its cluster is stopped, close it and leave its picture.

    before_stop: of the cluster, None without one. words: said to a page that has not got the widget, "" for nothing.
    Raises NotImplementedError outside of a kernel: IPython then displays the object as it displays any.
    """
    if getattr(notebook_shell(), "kernel", None) is None:
        raise NotImplementedError
    from IPython.display import display

    output = display(shown._repr_mimebundle_(), raw=True, display_id=True)

    def leave_picture() -> None:
        output.update(shown.still(), raw=True)
        shown.close()

    if before_stop is not None:
        before_stop.append(leave_picture)
    if words:
        there = ".jp-OutputArea:has(.nbkit-panel, .nbkit-dashboard) .nbkit-lost"
        text = html.escape(words).replace(DETACH, f"<code style='white-space: nowrap'>{DETACH}</code>")
        page = f"<style>{there} {{ display: none }}</style><p class='nbkit-lost'>{text}</p>"
        display({"text/plain": words, "text/html": page}, raw=True)
