"""Explains calls with arguments that a function does not take: the error says what it takes, and what to type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from nbkit.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
_ALIKE = 0.65


def says_what_it_takes(*, hint: str | Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a function raise UsageError if the arguments do not fit.

    It adds one frame to the call. hint: a call that fits, or a function that makes one from the given arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                # Only an error of the call itself counts. One within the function has the function's frame too.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                said = str(error)
            raise _unfit(said, function, kwargs, hint if isinstance(hint, str) else hint(*args, **kwargs))

        return called

    return decorate


def _unfit(said: str, function: Callable[..., Any], given: dict[str, Any], hint: str) -> UsageError:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    unknown = next((name for name in given if name not in names), None)
    return UsageError(
        f"{said.replace('.__init__', '').rstrip('.')}.",
        numbers=f"it takes {', '.join(f'{name}=' for name in names)}",
        hint=hint if unknown is None else _nearest(unknown, names) or hint,
    )


def _nearest(unknown: str, names: list[str]) -> str:
    """Return a hint with a parameter that has fewer of the same words, or a similar spelling; "" if there is none."""
    fewer = (name for name in names if set(name.split("_")) < set(unknown.split("_")))
    near = next(fewer, None) or next(iter(get_close_matches(unknown, names, n=1, cutoff=_ALIKE)), None)
    return f"{near}=..." if near else ""
