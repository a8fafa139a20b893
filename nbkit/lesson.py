"""Questions of a lesson. A reader predicts a number or a choice, runs an experiment, and sees what was measured.

    sent = nbkit.lesson.predict("How many S leave a rank?", key="1.2", unit="S", between=(0, 8), within="2%")
    ...                                                        # cells that run the experiment and measure `bytes_sent`
    sent.check(bytes_sent / S, formula=2 * (n - 1) / n, by="2 (n - 1) / n")

`predict` shows a form, in which the reader locks a guess. `check` shows the guess, the measured value and the formula
side by side. It shows nothing before the guess is locked. Without widgets, `sent.lock(1.5)` locks a guess.

A notebook that runs without a reader takes its guesses from the variable NBKIT_GUESSES: JSON such as `{"1.2": 1.5}`, or
the path of a file with it. A question that is not in it counts as "I do not know".

`judge` is for lessons in which the reader writes code. Ranks import this module too, so it imports Jupyter only where
it shows something.

Each guess and each answer is a line of the file `guesses.jsonl` in the notebook's folder. `collect(folder)` reads all
such files below a folder, for example the home directories of a class.
"""

from __future__ import annotations

import getpass
import html
import importlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbkit.errors import NbkitError, UsageError
from nbkit.figures import figure
from nbkit.techniques import judge_schedule

if TYPE_CHECKING:
    from nbkit.notebook.widgets.question_form import QuestionForm
    from nbkit.techniques import Judgement

__all__ = ["Guesses", "Prediction", "Verdict", "collect", "judge", "predict"]

FILE = "guesses.jsonl"
GIVEN = "NBKIT_GUESSES"
Guess = float | str | None
"""A number, one of the choices, or None for "I do not know"."""


def predict(
    question: str,
    *,
    key: str,
    unit: str = "",
    between: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
    within: float | str = "2%",
) -> Prediction:
    """Ask the reader for a number or a choice, and return the question.

    key: the name of the question in files, such as "1.2" for the second question of lesson 1. unit: the unit of the
    number, such as "MB", "%" or "times". between: the ends of a slider. Without it, the form has only a number field.
    choices: the answers to choose from, for a question without a number. within: the largest error of a correct guess:
    "2%" of the measured value, or a number in the unit.

    Raises UsageError for arguments that contradict each other, and if NBKIT_GUESSES cannot be read.
    """
    asked = Prediction(question, key, unit, between, tuple(choices), _Band.of(within))
    asked._ask()
    return asked


def judge(own: Any) -> Judgement:
    """Check code that a reader has written. The result names a wrong number and its likely cause.

    Call `nbkit.lesson.judge(MyDDP)` in a %%distributed cell. `if` treats the result as True if the code is right.

    own: a class for `nbkit.techniques.use`, or a function for `nbkit.schedules.register`. A class runs on 2 and on 3
    ranks, which are threads of this process. `judge` compares the results with one process, and counts the sent bytes.
    `judge` compares a schedule with the schedule 1F1B.

    Raises UsageError for any other object, and for a class if this process is not a rank.
    """
    if not isinstance(own, type) and callable(own):
        return judge_schedule(own)
    judged: Judgement = importlib.import_module("nbkit.rank.parallel.judge").judge(own)
    return judged


@dataclass(frozen=True)
class _Band:
    """The distance from the measured value at which a guess is still right."""

    size: float
    is_share: bool

    @classmethod
    def of(cls, within: float | str) -> _Band:
        text = str(within).strip()
        try:
            size = float(text.removesuffix("%"))
        except ValueError:
            size = -1.0
        if not (math.isfinite(size) and size >= 0):
            hint = 'within="2%", or a number in the unit of the answer'
            raise UsageError("within= is not a distance from the answer.", numbers=f"within={within!r}", hint=hint)
        return cls(size / 100, True) if text.endswith("%") else cls(size, False)

    def holds(self, guess: float, measured: float) -> bool:
        allowed = self.size * abs(measured) if self.is_share else self.size
        # A guess on the edge counts, whatever the last bit of the measured value is.
        return abs(guess - measured) <= allowed + 1e-9 * abs(measured)

    def words(self, unit: str) -> str:
        if not self.size:
            return "exactly"
        if self.is_share:
            return f"within {100 * self.size:g} %"
        return f"within {_with_unit(self.size, 'percentage points' if unit == '%' else unit)}"


@dataclass(frozen=True)
class Verdict:
    """A guess compared with the measured value. right: None if the reader did not guess."""

    question: str
    key: str
    unit: str
    guess: Guess
    measured: float | str
    formula: float | None
    by: str
    within: str
    right: bool | None

    @property
    def said(self) -> str:
        """Return the judgement in words."""
        if self.right is None:
            return "No guess."
        if self.right:
            return f"Right, {self.within}." if isinstance(self.measured, float) else "Right."
        if not isinstance(self.guess, float) or not isinstance(self.measured, float):
            return "Look again."
        apart = f" by {figure(100 * abs(self.guess / self.measured - 1))} %" if self.measured else ""
        return f"Look again: too {'large' if self.guess > self.measured else 'small'}{apart}."

    def columns(self) -> list[tuple[str, str]]:
        """Return the (title, value) pairs to show side by side."""
        shown = [("you said", "—" if self.guess is None else _with_unit(self.guess, self.unit))]
        shown.append(("measured", _with_unit(self.measured, self.unit)))
        if self.formula is not None:
            shown.append((f"formula {self.by}".strip(), _with_unit(self.formula, self.unit)))
        return shown

    def __repr__(self) -> str:
        return " · ".join(f"{title}: {value}" for title, value in self.columns()) + f" → {self.said}"

    def _repr_html_(self) -> str:
        titles, values = zip(*self.columns(), strict=True)
        mark = {True: "✓ ", False: "✗ ", None: ""}[self.right]
        question = html.escape(self.question)
        rows = (
            f"<tr>{''.join(f'<th scope=col>{html.escape(title)}</th>' for title in titles)}<th scope=col></th></tr>",
            f"<tr>{''.join(f'<td><b>{html.escape(value)}</b></td>' for value in values)}",
            f"<td>{mark}{html.escape(self.said)}</td></tr>",
        )
        return f"<div>{question}</div><table aria-label='{question}'>{''.join(rows)}</table>"


class Prediction:
    """A question and the reader's guess. `predict` makes it.

    locked: True if the reader has answered. guess: a number, a choice, or None for "I do not know". verdict: the guess
    compared with the measured value; None until the guess is locked and checked.
    """

    def __init__(
        self,
        question: str,
        key: str,
        unit: str,
        between: tuple[float, float] | None,
        choices: tuple[str, ...],
        band: _Band,
    ) -> None:
        if choices and between:
            raise UsageError("A question has a slider or choices, not both.", hint="leave out between= or choices=")
        if choices and (len(choices) < 2 or len(set(choices)) < len(choices)):
            numbers, hint = f"choices={list(choices)}", 'choices=("more", "as much", "less")'
            raise UsageError("Choices are at least two different texts.", numbers=numbers, hint=hint)
        if between and not between[0] < between[1]:
            raise UsageError("A slider goes from a smaller number to a larger one.", numbers=f"between={between}")
        self.question, self.key, self.unit, self.between, self.choices = question, key, unit, between, choices
        self.locked = False
        self.guess: Guess = None
        self.verdict: Verdict | None = None
        self._band = band
        self._form: QuestionForm | None = None
        self._waiting: list[Callable[[], None]] = []
        # The page's message may come in another thread than the one that runs cells.
        self._one_at_a_time = threading.RLock()

    @property
    def within(self) -> str:
        """Return the largest error of a correct guess, in words."""
        return self._band.words(self.unit)

    def lock(self, guess: Guess) -> None:
        """Set the guess. None stands for "I do not know". After this, the guess cannot change.

        Raises UsageError if the guess is not a number, or not one of the choices.
        """
        taken = self._checked(guess, "guess")
        with self._one_at_a_time:
            if self.locked:
                return
            self.guess, self.locked = taken, True
            _keep({"kind": "guess", **self._about()})
            if self._form is not None:
                self._form.tell_locked(taken)
            while self._waiting:
                self._waiting.pop(0)()

    def check(self, measured: float | str, *, formula: float | None = None, by: str = "") -> None:
        """Show guess, measured value and formula side by side, and say whether the guess is right.

        `question.verdict` keeps the result. If the guess is not locked yet, `check` shows a line that says so. When the
        reader locks the guess, the answer replaces this line.

        measured: a number in the unit of the question, or one of its choices. formula: the value that a formula gives.
        by: the formula in words, such as "2 (n - 1) / n".

        Raises UsageError if `measured` is not a number, or not one of the choices.
        """
        value = self._checked(measured, "measured value")
        if value is None:
            raise UsageError("The measured value is missing.", numbers=f"question {self.key}")

        def judge() -> Verdict:
            self.verdict = self._judged(value, formula, by)
            _keep({"kind": "answer", **self._about(), "measured": value, "formula": formula,
                   "right": self.verdict.right})  # fmt: skip
            return self.verdict

        with self._one_at_a_time:
            if self.locked:
                _display(judge())
            else:
                self._waiting.append(_display_later(self._judged(value, formula, by), judge))

    def _judged(self, value: float | str, formula: float | None, by: str) -> Verdict:
        right = None
        if isinstance(self.guess, float) and isinstance(value, float):
            right = self._band.holds(self.guess, value)
        elif self.guess is not None:
            right = self.guess == value
        return Verdict(self.question, self.key, self.unit, self.guess, value, formula, by, self.within, right)

    def _ask(self) -> None:
        given = _given()
        if given is not None:
            self.lock(given.get(self.key))
        elif _in_notebook():
            from nbkit.notebook.widgets.question_form import question_form

            self._form = question_form(self._form_values(), self.lock)
        _display(self)

    def _form_values(self) -> dict[str, Any]:
        band = "" if self.choices else f"A guess is right {self.within} of the measured value."
        if band and not self._band.size:
            band = "A guess is right if it is exactly the measured value."
        low, high = self.between or (None, None)
        return {"question": self.question, "unit": self.unit, "low": low, "high": high, "choices": list(self.choices),
                "band": band}  # fmt: skip

    def _checked(self, value: Any, what: str) -> Guess:
        """Return a number as float, and a choice unchanged."""
        if value is None:
            return None
        if self.choices:
            if value not in self.choices:
                numbers = f"{value!r}; the choices are {', '.join(map(repr, self.choices))}"
                raise UsageError(
                    f"The {what} is not one of the choices.", numbers=numbers, hint=f".lock({self.choices[0]!r})"
                )
            return str(value)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(f"The {what} is not a number.", numbers=repr(value)[:80], hint=".lock(1.5)")
        return number

    def _about(self) -> dict[str, Any]:
        return {"key": self.key, "question": self.question, "unit": self.unit, "guess": self.guess}

    def __repr__(self) -> str:
        if self.locked:
            said = "I do not know" if self.guess is None else _with_unit(self.guess, self.unit)
            return f"{self.question}\nYou said: {said}"
        how = " | ".join(map(repr, self.choices)) or f"a number{f' of {self.unit}' if self.unit else ''}"
        return f"{self.question}\n{self._form_values()['band']}\n.lock({how}), or .lock(None) if you do not know"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        first, *rest = (html.escape(line) for line in repr(self).splitlines() if line)
        page = f"<p><b>{first}</b><br>{'<br>'.join(rest)}</p>"
        from nbkit.notebook.widgets.widget_output import with_widget

        form = self._form.widget if self._form is not None else None
        return with_widget({"text/plain": repr(self), "text/html": page}, form, **options)


def _with_unit(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    return f"{figure(value)} {unit}".rstrip()


def _in_notebook() -> bool:
    from nbkit.notebook.cluster.registry import notebook_shell

    return getattr(notebook_shell(), "kernel", None) is not None


def _display(shown: Any) -> None:
    """Display in a notebook; print elsewhere."""
    if not _in_notebook():
        print(shown)
        return
    from IPython.display import display

    display(shown)


def _display_later(unguessed: Verdict, judge: Callable[[], Verdict]) -> Callable[[], None]:
    """Show a line that asks for the guess. Return a function that shows the verdict of `judge` in its place."""
    words = "Lock your guess first. Then the answer is here."
    if not _in_notebook():
        print(words)
        return lambda: print(judge())
    from IPython.display import display

    # A notebook that runs without a page keeps the text. A page shows the HTML, which does not tell the answer.
    bundle = {"text/plain": repr(unguessed), "text/html": f"<p role='status'>{words}</p>"}
    output = display(bundle, raw=True, display_id=True)

    def show() -> None:
        verdict = judge()
        output.update({"text/plain": repr(verdict), "text/html": verdict._repr_html_()}, raw=True)

    return show


def _given() -> Mapping[str, Guess] | None:
    """Return the guesses of NBKIT_GUESSES by key; None if it is not set."""
    text = os.environ.get(GIVEN, "").strip()
    if not text:
        return None
    try:
        found = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict):
        hint = f"""{GIVEN}='{{"1.1": 2.5, "1.2": "all ranks"}}', or the path of a file with such JSON"""
        raise UsageError(f"The guesses in {GIVEN} cannot be read.", numbers=f"{text[:80]}: {found}", hint=hint)
    return found


def _keep(line: dict[str, Any]) -> None:
    """Append a line to the file. If that fails, warn and let the lesson go on."""
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "user": _user(), **line}
    try:
        # One write of one line: several notebooks of a folder may append at the same time.
        with open(FILE, "ab", buffering=0) as file:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        warnings.warn(f"The guess is not kept: {Path(FILE).absolute()}: {error.strerror}", stacklevel=3)


def _user() -> str:
    if hub := os.environ.get("JUPYTERHUB_USER"):
        return hub
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        return ""


@dataclass(frozen=True)
class Guesses:
    """The guesses of a class. `rows` has a dict for each reader and question; use it as pandas.DataFrame(rows).

    A row describes the first guess: user, file, key, question, unit, guess, measured, right, tries, time. measured and
    right are None until the reader has run the check. unreadable: the number of lines that cannot be read.
    """

    rows: tuple[dict[str, Any], ...]
    unreadable: int

    def by_question(self) -> list[dict[str, Any]]:
        """Return a dict for each question: key, question, and the number of readers, right, wrong, unknown and open.

        unknown: the reader said "I do not know". open: the reader has not run the check.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            empty = {"key": row["key"], "question": row["question"], "readers": 0, "right": 0, "wrong": 0, "unknown": 0}
            one = found.setdefault(row["key"], empty | {"open": 0})
            one["readers"] += 1
            one[_state(row)] += 1
        return [found[key] for key in sorted(found, key=_in_order)]

    def __repr__(self) -> str:
        readers = len({(row["file"], row["user"]) for row in self.rows})
        lines = [f"{len(self.rows)} guesses of {readers} readers"]
        if self.unreadable:
            lines.append(f"{self.unreadable} lines cannot be read")
        for one in self.by_question():
            parts = ", ".join(f"{one[state]} {state}" for state in ("right", "wrong", "unknown", "open") if one[state])
            lines.append(f"{one['key']:>6}  {parts:<32} {one['question']}")
        return "\n".join(lines)


def collect(folder: str | os.PathLike[str]) -> Guesses:
    """Return the guesses in all files `guesses.jsonl` below a folder, such as the home directories of a class.

    `rows` of the result has a dict for each reader and question. Raises NbkitError if the folder does not exist.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NbkitError("There is no such folder.", numbers=str(root), hint="nbkit.lesson.collect('/home')")
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    unreadable = 0
    for path in sorted(root.rglob(FILE)):
        name = str(path.relative_to(root))
        for line in _lines(path):
            if line is None:
                unreadable += 1
                continue
            who = (name, str(line.get("user", "")), str(line["key"]))
            row = rows.get(who)
            if line["kind"] == "guess" and row is None:
                kept = {part: line.get(part) for part in ("question", "unit", "guess", "time")}
                user_and_key = {"user": who[1], "file": name, "key": who[2]}
                rows[who] = user_and_key | kept | {"measured": None, "right": None, "tries": 1}
            elif line["kind"] == "guess" and row is not None:
                row["tries"] += 1
            elif row is not None and row["tries"] == 1 and row["measured"] is None:
                row.update(measured=line.get("measured"), right=line.get("right"))
    return Guesses(tuple(rows.values()), unreadable)


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each line of a file; None for a line that is neither a guess nor an answer."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        yield None
        return
    for text in filter(str.strip, texts):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        good = isinstance(line, dict) and line.get("kind") in ("guess", "answer") and "key" in line
        yield line if good else None


def _state(row: Mapping[str, Any]) -> str:
    if row["guess"] is None:
        return "unknown"
    return {True: "right", False: "wrong", None: "open"}[row["right"]]


def _in_order(key: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts "2.1" before "10.1"."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in key.split("."))
