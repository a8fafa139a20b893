"""The digest of a value. Ranks compare digests to see that they hold equal facts and plans."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any


def digest_of(value: Any) -> str:
    """Return a digest of `value`, which consists of dataclasses, collections, errors and values with a stable repr."""
    return blake2b(_spelled(value).encode(), digest_size=8).hexdigest()


def _spelled(value: Any) -> str:
    if isinstance(value, str | int | float | None):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({_spelled([getattr(value, one.name) for one in fields(value) if one.compare])})"
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_spelled(key)}:{_spelled(each)}' for key, each in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(_spelled, value)))}}}"  # the order of a set differs between interpreters
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spelled, value))}]"
    return f"{type(value).__name__}({value})" if isinstance(value, Exception) else repr(value)
