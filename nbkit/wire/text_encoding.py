"""Make text encodable. Jupyter's messages are UTF-8, and a Python string may hold surrogates, which UTF-8 cannot."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """Return `value` (text, or dicts and lists of it) with lone surrogates as escapes: a backslash and five more."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "backslashreplace").decode()
        return value
    if isinstance(value, dict):
        return {encodable(key): encodable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        made = map(encodable, value)
        return tuple(made) if isinstance(value, tuple) else list(made)
    return value
