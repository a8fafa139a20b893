"""The option --json: a command or a magic prints JSON for programs instead of a table for people.

There is one rule. The object has the public fields of the value that would be shown, so the docstring of its class is
the schema. A class whose table has other columns than its fields has a method `as_json`, whose docstring is the schema.
Numbers are in bytes and seconds. What is not a number (NaN) or infinite becomes null. Names are only ever added.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Let a command or a verb take --json."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of a table")


def json_text(value: Any) -> str:
    """Return a value that is shown as a table, as JSON. Errors are raised as without --json."""
    return json.dumps(plain(value), indent=1, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, numbers and texts. Other objects become their text."""
    if hasattr(value, "as_json"):
        return plain(value.as_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if not each.name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
