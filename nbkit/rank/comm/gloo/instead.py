"""Which methods of a group that goes over gloo are made here, of other operations than gloo makes them of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbkit.rank.comm.gloo import all_gather, reduce_scatter

_INSTEAD = {**reduce_scatter.INSTEAD, **all_gather.INSTEAD}

EXCHANGED = frozenset(_INSTEAD)
"""Names for which `method` has another one than the inner group."""


def method(inner: Any, name: str) -> Callable[..., Any]:
    """The method `name` of an inner group; where one of `EXCHANGED` goes over gloo, an exchange if it can be."""
    own: Callable[..., Any] = getattr(inner, name)
    instead = _INSTEAD.get(name)
    if instead is None:
        return own

    def issue(*args: Any, **kwargs: Any) -> Any:
        work = instead(inner, *args, **kwargs) if not kwargs else None
        return own(*args, **kwargs) if work is None else work

    return issue
