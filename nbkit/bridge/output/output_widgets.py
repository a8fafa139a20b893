"""`with ipywidgets.Output():` on a rank, as rich's progress bars use it: what is printed inside goes into the widget.

In a notebook's own kernel the page does that, by the id of the cell that prints. All ranks print in one cell of the
notebook, so each rank does it itself, and tells the page what the widget holds.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

KEPT_CHARACTERS = 200_000  # of one text; the file on disk has all
_REWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")  # what a terminal would have overwritten


@dataclass
class _Area:
    """What one widget holds, as notebooks keep outputs. places: of displays that can be updated, by their id."""

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
        self._entered: list[str] = []  # those whose `with` is open, innermost last
        self._left: list[str] = []  # those whose own objects do not know yet what they hold
        self._telling = ""

    def on_open(self, comm: str, state: dict[str, Any]) -> None:
        if state.get("_model_name") == "OutputModel":
            self._areas[comm] = _Area(list(state.get("outputs") or ()))

    def on_close(self, comm: str) -> None:
        self._areas.pop(comm, None)
        self._entered = [other for other in self._entered if other != comm]

    def on_update(self, comm: str, state: dict[str, Any]) -> dict[str, Any]:
        """What a page is to know of an update that a widget sends."""
        area = self._areas.get(comm)
        if area is None:
            return state
        if "outputs" in state:  # append_stdout and the like
            area.outputs, area.places = list(state["outputs"]), {}
        if "msg_id" in state:
            self._entered = [other for other in self._entered if other != comm]
            if state["msg_id"]:
                self._entered.append(comm)
            else:
                self._left.append(comm)
        return {name: value for name, value in state.items() if name != "msg_id"}

    def take(self, kind: str, content: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """What is output now, if it goes into a widget: (its comm, the update for its pages)."""
        if kind == "update_display_data":
            # It may be of a widget that was left, or of the cell itself.
            known = [comm for comm, area in self._areas.items() if _display_id(content) in area.places]
            comm = known[-1] if known else None
        else:
            comm = self._entered[-1] if self._entered else None
        if comm is None:
            return None
        area = self._areas[comm]
        area.add(kind, content)
        # Emptied when the next output comes: until then the page shows what it had.
        return comm, {} if kind == "clear_output" and content.get("wait") else {"outputs": list(area.outputs)}

    def is_echo(self, comm: str, data: dict[str, Any]) -> bool:
        """Whether a widget only repeats what `tell_objects` has told it."""
        return comm == self._telling and data.get("method") == "echo_update"

    def tell_objects(self) -> None:
        """Tell widgets that were left what they hold, as a page would. In the thread that has left them."""
        while self._left:
            comm = self._left.pop()
            manager = sys.modules["comm"].get_comm_manager()
            found, area = manager.comms.get(comm), self._areas.get(comm)
            callback = getattr(found, "_msg_callback", None)  # handle_msg would also run what runs around a cell
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
