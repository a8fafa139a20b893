"""Explains calls whose arguments do not fit: the error lists the parameters of the function, and says what to type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from nbkit.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
_ALIKE = 0.65


def says_what_it_takes(
    *,
    hint: str | Callable[..., str],
    options: Mapping[str, type[Any]] | None = None,
    accept: Callable[[dict[str, Any], Iterable[str]], dict[str, Any]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a function raise UsageError if the arguments do not fit.

    The decorator adds one frame to the stack. hint: a call that fits, or a function that makes one from the given
    arguments. options: argument -> the dataclass that it takes. If an unknown keyword resembles a field of one, the
    hint names that argument. accept: (keywords, parameters of the function) -> the keywords to call it with.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        of_options = {name: kind for name, kind in (options or {}).items() if name in names}

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given: Any = kwargs if accept is None else accept(kwargs, names)
            try:
                return function(*args, **given)
            except TypeError as error:
                # Explain only an error of the call itself. An error inside the function has one more frame.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                said = str(error)
            example = hint if isinstance(hint, str) else hint(*args, **kwargs)
            raise _unfit(said, names, of_options, given, example)

        return called

    return decorate


def _unfit(
    said: str, names: list[str], options: Mapping[str, type[Any]], given: dict[str, Any], hint: str
) -> UsageError:
    unknown = next((name for name in given if name not in names), None)
    return UsageError(
        f"{said.replace('.__init__', '').rstrip('.')}.",
        numbers=f"it takes {', '.join(f'{name}=' for name in names)}",
        hint=hint if unknown is None else _nearest(unknown, names, options) or hint,
    )


def _nearest(unknown: str, names: list[str], options: Mapping[str, type[Any]]) -> str:
    """Return a hint with the parameter or field that the user probably meant by `unknown`; "" if there is none.

    A field of exactly this name comes first. Then come parameters, and last fields, that consist of some of the words
    of `unknown` or have a similar spelling.
    """
    typed = {name: f"{name}=..." for name in names}
    inner = {
        field.name: f"{name}=nbkit.{kind.__name__}({field.name}=...)"
        for name, kind in options.items()
        for field in fields(kind)
    }
    if unknown in inner:
        return inner[unknown]
    for known in (typed, inner):
        fewer = (name for name in known if set(name.split("_")) < set(unknown.split("_")))
        near = next(fewer, None) or next(iter(get_close_matches(unknown, known, n=1, cutoff=_ALIKE)), None)
        if near:
            return known[near]
    return ""
