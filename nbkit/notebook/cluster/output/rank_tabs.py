"""A cell's output with a tab for each rank. A rank's printed text is in its tab. All other output is below.

While the cell runs, the tabs are a widget. Afterwards they are HTML without scripts, because a saved notebook would
show an error in place of a widget.
"""

from __future__ import annotations

import html
import re
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from nbkit.notebook.cluster.output.display import KernelScreen

FLUSH_SECONDS = 0.25
KEPT_CHARACTERS = 40_000  # the newest of a rank; each update sends all of them to the page
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PRE = (
    "margin:0;padding:4px 8px;max-height:30em;overflow:auto;white-space:pre-wrap;background:transparent;"
    "color:inherit;font-family:var(--jp-code-font-family,monospace);"
    "font-size:var(--jp-code-font-size,13px);line-height:var(--jp-code-line-height,1.3)"
)
_STYLE = """
.nbkit-tabs { display: flex; flex-wrap: wrap; }
.nbkit-tabs > input { position: absolute; opacity: 0; }
.nbkit-tabs > label { order: 1; padding: 3px 10px; cursor: pointer; border-bottom: 2px solid transparent;
  color: inherit; font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; }
.nbkit-tabs > input:checked + label { border-color: var(--jp-brand-color1, #1976d2); font-weight: 600; }
.nbkit-tabs > input:focus-visible + label { outline: 2px solid var(--jp-brand-color1, #1976d2); }
.nbkit-tabs > pre { display: none; order: 2; width: 100%; box-sizing: border-box;
  border-top: 1px solid var(--jp-border-color2, #888); }
.nbkit-tabs > input:checked + label + pre { display: block; }
"""


class RankText:
    """The printed text of a rank, as a terminal would show it: text after `\\r` replaces the line."""

    def __init__(self) -> None:
        self.text = ""  # complete lines
        self.line = ""
        self.dropped = 0  # number of old lines that were removed
        self._returned = False

    def feed(self, printed: str) -> None:
        for piece in re.split(r"([\r\n])", _ANSI.sub("", printed)):
            if piece == "\n":
                self.text, self.line, self._returned = f"{self.text}{self.line}\n", "", False
            elif piece == "\r":
                self._returned = True
            elif piece:
                self.line, self._returned = (piece if self._returned else self.line + piece), False
        if len(self.text) > 2 * KEPT_CHARACTERS:
            at = self.text.index("\n", len(self.text) - KEPT_CHARACTERS - 1) + 1
            self.dropped += self.text.count("\n", 0, at)
            self.text = self.text[at:]

    def __str__(self) -> str:
        above = f"… {self.dropped:,} lines more are in the cluster's output folder (%cluster status)\n"
        return f"{above if self.dropped else ''}{self.text}{self.line}"


class RankTabs(KernelScreen):
    """The screen of a notebook cell, with tabs above its other output. Create it in the cell, on the main thread.

    later: runs a function on the client's thread after the given number of seconds. `feed` is called on that thread
    too.
    """

    def __init__(self, kernel: Any, ranks: Sequence[int], later: Callable[[float, Callable[[], None]], Any]) -> None:
        super().__init__(kernel)
        import ipywidgets  # type: ignore[import-untyped]

        self.later = later
        self.texts = {rank: RankText() for rank in ranks}
        self.panes = {rank: ipywidgets.HTML() for rank in ranks}
        titles = [_title(rank, len(ranks)) for rank in ranks]
        self.widget = ipywidgets.Tab(children=list(self.panes.values()), titles=titles, selected_index=0)
        self.changed: set[int] = set()
        self.id = f"nbkit-{uuid.uuid4().hex[:12]}"
        self._ending = threading.Lock()
        self._ended = False
        self.display(*self.as_output())

    def as_output(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the tabs as data, metadata and transient of a display."""
        shown = self.widget._repr_mimebundle_()
        bundle = dict(shown[0] if isinstance(shown, tuple) else shown)
        return bundle | self.still(), {}, {"display_id": self.id}

    def feed(self, rank: int, text: str) -> None:
        """Accept text that `rank` has printed."""
        if rank not in self.texts:  # the rank joined while the cell runs
            self.texts[rank] = RankText()
        self.texts[rank].feed(text)
        if not self.changed:
            self.later(FLUSH_SECONDS, self._flush)
        self.changed.add(rank)

    def empty(self, ranks: Collection[int]) -> None:
        """Empty the tabs of these ranks."""
        for rank in ranks:
            self.texts[rank] = RankText()
            self.feed(rank, "")

    def _flush(self) -> None:
        changed, self.changed = self.changed, set()
        with self._ending:
            for rank in sorted(changed & self.panes.keys()):
                if not self._ended:
                    self.panes[rank].value = f"<pre style='{_PRE}'>{html.escape(str(self.texts[rank]))}</pre>"

    def end(self) -> None:
        """Replace the widget by HTML that needs no kernel, because the cell has ended."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            selected = self.widget.selected_index or 0
            self.update(self.still(selected), {}, {"display_id": self.id})
            for widget in (*self.panes.values(), self.widget):
                widget.close()

    def still(self, selected: int = 0) -> dict[str, str]:
        """Return the tabs as text and as an HTML page. selected: the position of the open tab."""
        plain = "\n".join(f"rank {rank}\n{_indented(str(text))}" for rank, text in self.texts.items())
        tabs = "".join(
            f"<input type='radio' name='{self.id}' id='{self.id}-{rank}'{' checked' if place == selected else ''}>"
            f"<label for='{self.id}-{rank}'>{_title(rank, len(self.texts))}</label>"
            f"<pre style='{_PRE}'>{html.escape(str(text))}</pre>"
            for place, (rank, text) in enumerate(self.texts.items())
        )
        return {"text/plain": plain, "text/html": f"<style>{_STYLE}</style><div class='nbkit-tabs'>{tabs}</div>"}


def _title(rank: int, n: int) -> str:
    return f"rank {rank}" if n <= 12 else str(rank)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
