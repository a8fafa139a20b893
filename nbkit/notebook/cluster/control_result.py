"""The result of a switch, a try, a pause: one line of text, a small table of predicted beside measured, or an error."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbkit import errors
from nbkit.errors import NbkitError

_DONE = {"pause": "paused", "resume": "going on", "save": "saved", "stop": "stopped"}


@dataclass(frozen=True)
class ControlResult:
    """As the ranks return it. strategy: the one in force afterwards. error: the name of its class, "" when it was done.
    served: False when the training ended before it came to the control, which then waits for nothing any more.

    result: of a switch or undo the fields of nbkit.records.events.Switched, of a try and a comparison what the Trainer
    returns. predicted: moved_bytes and switch_s of a switch, as predicted before it, and why the latter was not; {}
    where nothing was.
    """

    id: str
    do: str
    args: Mapping[str, Any]
    step: int
    strategy: str
    ok: bool
    error: str
    what: str
    numbers: str
    hint: str
    result: Mapping[str, Any]
    served: bool = True
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise what the ranks raised."""
        if self.ok:
            return
        kind = getattr(errors, self.error, NbkitError)
        plain = isinstance(kind, type) and issubclass(kind, NbkitError) and kind.__init__ is NbkitError.__init__
        raise (kind if plain else NbkitError)(self.what, numbers=self.numbers, hint=self.hint)

    @property
    def line(self) -> str:
        """One line."""
        if not self.ok:
            return " ".join(part for part in (self.what, f"({self.numbers})" * bool(self.numbers)) if part)
        if self.do in ("switch", "undo"):
            return f"{self.result['old']} → {self.result['new']} after step {self.step}"
        if self.do == "try":
            tried, before = self.result["step_s"], self.result["before_step_s"]
            steps = f"{self.result['steps']} step{'s' * (self.result['steps'] != 1)}"
            beside = f"{seconds(before)} under {self.strategy}" if before else f"{self.strategy} is not measured yet"
            change = f", {before / tried:.2f} × as fast" if tried and before else ""
            return f"tried {self.result['strategy']} for {steps}: {seconds(tried)} a step, {beside}{change}"
        if self.do == "compare":
            return f"compared for {self.result['steps']} steps each at step {self.step}, under {self.strategy} again"
        if self.do == "fit":
            then = "going on" if self.result["goes_on"] else "trainer.fit(...) goes on"
            return f"{self.result['changes']} after step {self.step}: {then}"
        if self.do == "resize" and "moved_bytes" in self.result:
            told = self.result
            moved = f"{size(told['moved_bytes'])} moved, {seconds(told['pause_s'])} without a step"
            ranks = f"{told['old_ranks']} → {told['ranks']} ranks after step {told['step']}"
            return f"{ranks}, {told['old']} → {told['new']}: {moved}"
        if self.do == "resize":
            return f"{self.result['ranks']} ranks; nothing trains on them"
        if self.do == "trace":
            return f"tracing steps {self.result['first']} to {self.result['last']}"
        where = f" {self.result['path']}" if self.do == "save" else ""
        return f"{_DONE[self.do]}{where} after step {self.step}"

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """(what, predicted, measured) of a switch; a prediction may be unknown."""
        if not self.ok or self.do not in ("switch", "undo"):
            return []
        pause = self.predicted.get("switch_s")
        unknown = f"not yet ({why})" if (why := self.predicted.get("why")) else seconds(None)
        return [
            ("bytes moved", size(self.predicted.get("moved_bytes")), size(self.result["moved_bytes"])),
            ("pause", seconds(pause) if pause is not None else unknown, seconds(self.result["pause_s"])),
        ]

    def __repr__(self) -> str:
        if self.ok and self.do == "compare":
            return "\n".join([self.line, *_lined_up(self.compared)])
        rows = [f"  {what:<12} predicted {predicted:<10} measured {found}" for what, predicted, found in self.figures]
        return "\n".join([self.line, *rows, *([f"  {proof(self.result)}"] if rows else [])])

    @property
    def compared(self) -> list[tuple[str, ...]]:
        """The rows of a comparison, the first of them its head."""
        head = "strategy", "a step", "95 % of the median", "memory beyond before", "sent a step"
        return [head, *(_compared(row) for row in self.result["strategies"])]

    def _repr_html_(self) -> str:
        if self.ok and self.do == "compare":
            cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.compared]
            return f"<b>{html.escape(self.line)}</b><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        if not self.figures:
            return f"<span>{html.escape(self.line)}</span>"
        rows = "".join(
            f"<tr><td>{html.escape(what)}</td><td>{html.escape(predicted)}</td><td>{html.escape(found)}</td></tr>"
            for what, predicted, found in self.figures
        )
        head = "<tr><th></th><th>predicted</th><th>measured</th></tr>"
        return f"<b>{html.escape(self.line)}</b><table>{head}{rows}</table><small>{proof(self.result)}</small>"


def _compared(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return row["strategy"], row["error"], "", "", ""
    between = f"{seconds(row['low_s'])} to {seconds(row['high_s'])}"
    return row["strategy"], seconds(row["step_s"]), between, size(row["memory_bytes"]), size(row["sent_bytes"])


def _lined_up(rows: list[tuple[str, ...]]) -> list[str]:
    # What refuses a strategy is as long as it likes, and stands alone.
    widths = [max(len(row[at]) for row in rows if row[-1]) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def stopped(step: int) -> ControlResult:
    """Of a training that was stopped, after so many steps."""
    return ControlResult("", "stop", {}, step, "", True, "", "", "", "", {})


def proof(switched: Mapping[str, Any]) -> str:
    """Whether the state is the same as before."""
    words = {True: "state identical, bit for bit", False: "STATE DIFFERS", None: "state not compared"}
    return words[switched.get("identical")]


def size(count: float | None) -> str:
    """Bytes for people; "unknown" for None."""
    if count is None:
        return "unknown"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds for people; "unknown" for None."""
    if value is None:
        return "unknown"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
