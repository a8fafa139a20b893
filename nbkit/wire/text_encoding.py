"""Make text encodable. Jupyter's messages are UTF-8, which cannot encode the surrogates of some Python strings."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """Return `value` (text, or dicts and lists of text) with lone surrogates as backslash escapes."""
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
