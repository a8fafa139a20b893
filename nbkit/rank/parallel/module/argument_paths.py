"""Paths of tensors among the arguments of a call, as torch's pytrees write them: "[0][0]", "[1]['mask']", "[0][2].x".

They are read and written by hand. Flattening all arguments by name takes tens of microseconds, in every step.
"""

from __future__ import annotations

import copy
import re
from ast import literal_eval
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_STEP = re.compile(r"\[([^\]]*)\]|\.(\w+)")


@lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[tuple[bool, Any], ...]:
    """Return (whether it is an attribute, the index, key or name) of each step."""
    return tuple((not key, literal_eval(key) if key else name) for key, name in _STEP.findall(path))


def look(tree: Any, path: str) -> Any:
    """Return the value at `path`; None if there is none."""
    try:
        for is_attribute, key in _steps(path):
            tree = getattr(tree, key) if is_attribute else tree[key]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return tree


def put(tree: Any, path: str, value: Any) -> Any:
    """Return `tree` with `value` at `path`. Objects on the way are copied, never changed."""
    return _put(tree, _steps(path), value)


def _put(tree: Any, steps: tuple[tuple[bool, Any], ...], value: Any) -> Any:
    if not steps:
        return value
    (is_attribute, key), *rest = steps
    inner = _put(getattr(tree, key) if is_attribute else tree[key], tuple(rest), value)
    if isinstance(tree, tuple):
        at = tree._fields.index(key) if is_attribute else key  # type: ignore[attr-defined]
        parts = (*tree[:at], inner, *tree[at + 1 :])
        return parts if type(tree) is tuple else type(tree)(*parts)
    changed = copy.copy(tree)
    if is_attribute and not isinstance(tree, Mapping):
        setattr(changed, key, inner)
    else:
        changed[key] = inner
    return changed
