"""Lengths of time as people type and read them: "30s", "10min", "2h", "1d"; a plain number is seconds."""

from __future__ import annotations

import re

from nbkit.errors import UsageError

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|min|h|d|)")


def seconds_of(text: str | float) -> float:
    """Return the seconds in "30s", "10min", "2h", "1d" or "45". Raises UsageError for anything else, and for 0."""
    found = _FORM.fullmatch(str(text).strip())
    seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if not seconds:
        raise UsageError(
            f"{text!r} is no length of time.",
            numbers="a number of seconds above 0, or one with its unit: s, min, h, d",
            hint="30s   or   10min   or   2h",
        )
    return seconds


def seconds_given(value: str | float | None) -> float | None:
    """Return an argument in seconds. Texts are read by `seconds_of`; numbers and None are returned unchanged."""
    return seconds_of(value) if isinstance(value, str) else value


def text_of(seconds: float) -> str:
    """Return a length of time for people, such as "40 s", "12 min", "3 h" or "2 d"."""
    for unit in ("d", "h", "min"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.2g} {unit}"
    return f"{max(seconds, 0):.0f} s"
