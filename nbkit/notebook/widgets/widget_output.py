"""The output of a cell that shows a widget: the widget while its cluster is there, then a picture of it.

A saved notebook has no kernel: a page says "Error displaying widget" there, whatever else the output holds.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, Protocol

from nbkit.notebook.cluster.naming import notebook_shell
from nbkit.notebook.widgets.messages_during_cells import DETACH


class Shown(Protocol):
    """What has a widget. still: the MIME bundle of its picture, which needs no kernel."""

    def still(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def _repr_mimebundle_(self) -> dict[str, Any]: ...


def with_widget(still: dict[str, Any], widget: Any, **options: Any) -> dict[str, Any]:
    """A MIME bundle: the picture for pages and notebooks without widgets, and the widget where it is not None."""
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
