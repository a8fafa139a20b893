"""The cells and values that the notebook sent to a cluster's ranks, in order. Exports make a script from them.

The list is emptied when the ranks are restarted, because their variables are lost.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nbkit.notebook.cluster.cells.results import Results
from nbkit.wire.cells import CellRequest

LONGEST_LITERAL = 2_000  # characters; longer values are data, not settings


class SentCell:
    """A cell that was sent.

    live: it ran at a step boundary of a training. state: "ok", "running", "interrupted" (the user stopped it), or the
    error. Results are not kept, because they may be large.
    """

    def __init__(self, request: CellRequest, live: bool, done: Future[Results]) -> None:
        self.request, self.live, self.state = request, live, "running"
        done.add_done_callback(self._end)

    def _end(self, done: Future[Results]) -> None:
        error = done.exception()
        self.state = done.result().status if error is None else str(error).partition("\n")[0]


@dataclass(frozen=True)
class SentValues:
    """Pushed values. literals: name -> the value as a Python literal. others: name -> a description of the value."""

    number: int
    ranks: tuple[int, ...]
    literals: Mapping[str, str]
    others: Mapping[str, str]

    @classmethod
    def of(cls, number: int, ranks: tuple[int, ...], values: Mapping[str, Any]) -> SentValues:
        """Return a record of the values, as they are now."""
        literals = {name: text for name, value in values.items() if (text := literal_text(value))}
        others = {name: type_text(value) for name, value in values.items() if name not in literals}
        return cls(number, ranks, literals, others)


def literal_text(value: Any) -> str:
    """Return `value` as a Python literal with the same value and types; "" if it is not one, or is very long."""
    try:
        text = repr(value) if _is_plain(value) else ""
        return text if len(text) <= LONGEST_LITERAL and ast.literal_eval(text) == value else ""
    except (ValueError, SyntaxError, RecursionError):  # e.g. inf, or a list that contains itself
        return ""


def type_text(value: Any) -> str:
    """Return a description of the value's type, for people: `numpy.ndarray`, `a list of 5000`."""
    kind = type(value)
    if kind in (list, tuple, dict, set, str, bytes):
        return f"a {kind.__name__} of {len(value):,}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, dict, str, bytes) and len(value) > LONGEST_LITERAL:
        return False
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    return type(value) in (int, float, str, bool, bytes, complex, type(None))
