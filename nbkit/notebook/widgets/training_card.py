"""The card of a cell that trains: HTML in the cell's own output, which stays in the saved notebook.

While the cell trains, a widget shows the same in its place. The reason: a reloaded page gets no updates of earlier
outputs, but its widgets still work.

The card appears soon after a training of the cell begins to record. It is updated in place about once a second, and
ends as a summary. Before that, and in a cell that does not train, a clock is in its place after 3 seconds. After 10
seconds the clock says which ranks still work, and where. A shorter cell shows neither.
"""

from __future__ import annotations

import html
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nbkit.errors import NbkitError
from nbkit.figures import figure
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.cluster.output.display import NOBODY, ShownMessage
from nbkit.notebook.cluster.why import RankState, at_work, collect
from nbkit.notebook.run.reader import RunReader
from nbkit.notebook.widgets.dashboard.text_view import steps_of
from nbkit.notebook.widgets.svg import image
from nbkit.notebook.widgets.widget_output import EMPTY, beside_widget, view_of, with_display_id
from nbkit.records.event_words import failure

AFTER_SECONDS = 1.5  # most cells have ended by then
_EVERY_SECONDS, _SHARE = 1.0, 0.005  # at most this share of a core
_UNSEEN_SECONDS = 0.2  # between looks before a training is seen, because the training may last less than a second
_CLOCK_SECONDS, _DOING_SECONDS, _ASK_SECONDS = 3.0, 10.0, 5.0
_WIDTH, _HEIGHT, _POINTS = 260, 44, 130
_STILL_SECONDS = 60
_SCRIPT = """export default {
  render({ model, el }) {
    const root = document.createElement("div");
    root.className = "nbkit-live";
    const show = () => { root.innerHTML = model.get("page"); };
    model.on("change:page", show);
    show();
    el.append(root);
    return () => model.off("change:page", show);
  },
};"""
# Without the widget, a reloaded page gets no updates; this style makes it say so by itself.
_STILL = (
    "<style>@keyframes nbkit-still { to { visibility: visible; max-height: 4em; } }</style>"
    "<div style='visibility:hidden;max-height:0;overflow:hidden;opacity:.6;"
    f"animation:nbkit-still 1ms {_STILL_SECONDS}s forwards'>This card has not changed for a minute. If the page was "
    "loaded anew meanwhile, it will not change any more: %dashboard shows the training.</div>"
)


def follow(cluster: Cluster, execution: Execution) -> None:
    """Show a card in the output of this cell if it trains for a while and its output can be changed in place."""
    if not hasattr(execution.outbox.screen, "kernel"):
        return
    client, training = cluster.connection.client, cluster.training

    def begin() -> None:
        if not execution.done.done():
            connection = cluster.connection
            card = LiveCard(execution, NewestRun(connection), training.runs, client.soon)
            card.states = lambda: collect(connection.entry, client, connection.deaths)
            card.start()

    client.soon(client.later, AFTER_SECONDS, begin)


class LiveCard:
    """A card that a thread updates from the training's records until the cell ends.

    directory: returns the run's directory, or None if there is none yet. trains: returns True if the ranks are in a
    training. soon: runs a function on the client's thread.
    """

    def __init__(
        self,
        execution: Execution,
        directory: Callable[[], Path | None],
        trains: Callable[[], bool],
        soon: Callable[..., object],
    ) -> None:
        self._execution, self._directory, self._trains, self._soon = execution, directory, trains, soon
        self._reader: RunReader | None = None
        self._first = 0  # number of finished steps when the cell's training began
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}
        self._shown = False
        self._picture_due = 0.0  # a picture of all ranks costs far more than the curve, and changes slowly
        self.states: Callable[[], Mapping[int, RankState]] = dict  # asks the ranks what they are doing
        self._doing, self._doing_due, self._told = "", 0.0, ""
        self._live: Any = None  # the widget, from the first card on
        execution.observers.append(self._finish)

    def start(self) -> None:
        """Start the thread. It ends with the cell."""
        threading.Thread(target=self._keep_looking, name="nbkit-card", daemon=True).start()

    def _keep_looking(self) -> None:
        while not self._execution.done.done():
            began, apart = time.thread_time(), 0.0
            try:
                apart = self._look()
            except Exception as error:
                # The cell's own output tells errors of the ranks. A failed card must not add a traceback to it.
                if not isinstance(error, NbkitError | OSError):
                    print(f"no card: {type(error).__name__}: {error}", file=sys.__stderr__)
            deadline = time.monotonic() + self._rest(time.thread_time() - began - apart)
            while time.monotonic() < deadline and not self._execution.done.done():
                time.sleep(0.1)

    def _rest(self, used: float) -> float:
        """Return the seconds until the next look. used: the CPU seconds of this one."""
        return max(_EVERY_SECONDS if self._reader else _UNSEEN_SECONDS, used / _SHARE)

    def _look(self) -> float:
        """Show new data. Return the CPU seconds of the picture, because pictures have their own interval."""
        apart = 0.0
        # Check this before the directory. In the other order, a training that begins between the two checks would be
        # shown with the directory of the previous run.
        if self._reader is None and not self._trains():
            self._tick()
            return apart
        folder = self._directory()
        if folder is None:
            self._tick()
            return apart
        began = time.thread_time()
        with self._lock:
            if self._reader is None or self._reader.run_dir != folder:
                self._reader = RunReader(folder)
                self._reader.look()
                self._first = _started(self._reader.curve.events)
                self._picture_due = 0.0
            if time.monotonic() >= self._picture_due:
                self._reader.picture()
                apart = time.thread_time() - began
                self._picture_due = time.monotonic() + apart / _SHARE
            if bundle := self._bundle(ended=False, anew=False):
                self._soon(self._put, bundle)
        if not self._last:
            self._tick()
        return apart

    def _tick(self) -> None:
        """Show how long the cell has run, and after a while what the ranks are doing."""
        execution, seconds = self._execution, time.time() - self._execution.sent
        if seconds < _CLOCK_SECONDS or execution.prompts or execution.closing:
            return
        if seconds >= _DOING_SECONDS and time.monotonic() >= self._doing_due:
            self._doing_due = time.monotonic() + _ASK_SECONDS
            self._doing = at_work(self.states(), execution.waiting_for)
        before, self._told = self._told, f"{_clock(seconds)}{' · ' * bool(self._doing)}{self._doing}"
        if self._told != before:
            self._soon(self._put, clock_bundle(self._told))

    def _finish(self, _: Execution) -> None:
        """Show the summary when the cell ends. Runs on the client's thread."""
        try:
            with self._lock:
                if self._reader and (bundle := self._bundle(ended=True)):
                    self._put(bundle, last=True)
                elif self._shown and not self._last:
                    self._put(clock_bundle(f"took {_clock(time.time() - self._execution.sent)}"), last=True)
        except Exception as error:  # a card must not keep a cell from ending
            self._execution.say(f"nbkit: no last card: {type(error).__name__}: {error}")

    def _bundle(self, *, ended: bool, anew: bool = True) -> dict[str, str]:
        """Return the MIME bundle to show; {} if nothing is new."""
        assert self._reader is not None
        snapshot = self._reader.snapshot(anew=anew)
        points = [point for point in snapshot["points"] if point[0] > self._first]
        if not points:
            return {}
        seen = snapshot | {"points": points}
        bundle = {"text/plain": card_text(seen, ended=ended), "text/html": card_html(seen, ended=ended)}
        before, self._last = self._last, bundle
        return bundle if bundle != before else {}

    def _put(self, bundle: dict[str, str], *, last: bool = False) -> None:
        """Show the bundle. Runs on the client's thread."""
        if self._execution.closing and not last:
            return
        self._execution.lines.has_card = bool(self._last)
        if not self._shown:
            for name, text in self._execution.lines.make_way():
                self._execution.outbox.stream(name, text)
        name = f"nbkit-card-{self._execution.request.id}"
        transient, metadata = {"display_id": name}, with_display_id(name)
        page = bundle["text/html"]
        bundle = beside_widget(bundle)
        self._execution.outbox.put("update" if self._shown else "display", bundle, metadata, transient)
        content = {"data": bundle, "metadata": metadata, "transient": transient}
        self._execution.shown.add(
            ShownMessage(NOBODY, "update_display_data" if self._shown else "display_data", content)
        )
        self._shown = True
        if self._last:
            self._put_live(page, last=last)

    def _put_live(self, page: str, *, last: bool) -> None:
        """Show the page in the widget too. At the end remove the widget; a reloaded page keeps it with the summary."""
        transient = {"display_id": f"nbkit-live-{self._execution.request.id}"}
        if self._live is None and not last and (kind := _live_card()) is not None:
            self._live = kind()
            self._execution.outbox.put("display", view_of(self._live), {}, transient)
        if self._live is not None:
            self._live.page = page
            if last:
                self._execution.outbox.put("update", EMPTY, {}, transient)


@cache
def _live_card() -> Any:
    """Return the class of the widget, or None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Card(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        _esm = _SCRIPT
        page = traitlets.Unicode().tag(sync=True)

    return Card


def clock_bundle(words: str) -> dict[str, str]:
    """Return a line about a running cell, as a MIME bundle."""
    style = "opacity:.6;font-variant-numeric:tabular-nums"
    return {"text/plain": words, "text/html": f"<div class='nbkit-clock' style='{style}'>{html.escape(words)}</div>"}


def _clock(seconds: float) -> str:
    """Return a duration as text: "8 s", "2:05 min", "1:02:05 h"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = f"{whole // 60 % 60}:{whole % 60:02}", whole // 3600
    return f"{hours}:{minutes.zfill(5)} h" if hours else f"{minutes} min"


def card_text(snapshot: dict[str, Any], *, ended: bool = False) -> str:
    """Return one or two lines about the points in a RunReader.snapshot."""
    head, figures, reading = _words(snapshot, ended)
    return "\n".join(line for line in (f"{head}   {figures}", reading) if line)


def card_html(snapshot: dict[str, Any], *, ended: bool = False) -> str:
    """Return the same as HTML, with the curve of the loss. Until the end, the card says if it gets no updates."""
    head, figures, reading = (html.escape(part) for part in _words(snapshot, ended))
    colour = "#808080" if ended else "#388e3c"  # not a variable of the theme, which an untrusted notebook loses
    return (
        "<div class='nbkit-card' style='display:flex;gap:14px;align-items:center;flex-wrap:wrap;padding:4px 0'>"
        f"{_curve([point[4] for point in snapshot['points']])}"
        "<div style='flex:1 1 300px;min-width:0'>"
        f"<div><span style='color:{colour}'>●</span> <b>{head}</b> {figures}</div>"
        f"<div style='opacity:.6'>{reading}</div>{'' if ended else _STILL}</div></div>"
    )


def _words(snapshot: dict[str, Any], ended: bool) -> tuple[str, str, str]:
    points, state = snapshot["points"], snapshot["state"]
    first, last = points[0], points[-1]
    strategy = snapshot["strategies"][int(last[6])] or state["run"]
    loss, tokens = figure(last[4]), last[5]
    if ended:
        made, seconds = int(last[0] - first[0] + first[1]), last[2] - first[2]
        loss = f"{figure(first[4])} → {loss}" if figure(first[4]) else loss
        tokens = (last[3] - first[3]) / seconds if seconds > 0 else tokens
        earlier = f", {int(last[0]):,} with those before" if int(last[0]) > made else ""
        steps = f"{made:,} step{'s' * (made > 1)}{earlier}"
    else:
        steps, tokens = steps_of(last[0], state), state.get("rate")
    mean = " on average" if ended else ""
    figures = [
        steps,
        "" if ended else state.get("left", ""),
        f"loss {loss}" if loss else "",
        f"{figure(tokens)} {state['unit']}/s{mean}" if tokens and figure(tokens) else "",
    ]
    failed = [event for event in snapshot["events"] if event["kind"] == "failure" and event["step"] >= first[0] - 1]
    reading = snapshot["step"].get("reading", "")
    how = next((event.get("reason") for event in reversed(snapshot["events"]) if event["kind"] == "run_stopped"), "")
    # A failed or undone switch did not end the run.
    if ended and failed and how not in ("done", "stopped"):
        reading = f"ended by an error: {failure(failed[-1])}"
    newest = snapshot["events"][-1] if snapshot["events"] else {}
    if not ended and newest.get("kind") == "out_of_memory" and not newest.get("changes"):
        reading = f"waits, out of memory: {newest.get('what')}; %train fit goes on with what fits"
    return strategy, " · ".join(word for word in figures if word), reading


def _started(events: Sequence[dict[str, Any]]) -> int:
    """Return the number of finished steps when the newest run began."""
    return next((int(event["step"]) for event in reversed(events) if event["kind"] == "run_started"), 0)


def _curve(values: Sequence[float]) -> str:
    """Return the loss as a small picture, or "" for fewer than two values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    per = -(-len(known) // _POINTS)
    means = [sum(known[i : i + per]) / len(known[i : i + per]) for i in range(0, len(known), per)]
    low, high = min(means), max(means)
    across, down = _WIDTH / max(len(means) - 1, 1), (_HEIGHT - 4) / ((high - low) or 1.0)
    line = " ".join(f"{i * across:.1f},{2 + (high - value) * down:.1f}" for i, value in enumerate(means))
    picture = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}'>"
        f"<polyline points='{line}' fill='none' stroke='#68717d' stroke-width='1.8'/></svg>"
    )
    return image(picture, "loss", f"width:{_WIDTH}px;height:{_HEIGHT}px")
