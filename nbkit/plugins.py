"""Code of users and of other packages: loads what packages offer by entry points, and describes errors in such code."""

from __future__ import annotations

import sysconfig
import traceback
from importlib.metadata import EntryPoint
from typing import Any

from nbkit.errors import NbkitError

_OWN = __file__.rpartition("plugins.py")[0]


def load(entry: EntryPoint, what: str, error: type[NbkitError]) -> Any:
    """Return the object that an entry point of another package names. Raises `error` if it cannot be imported.

    what: the kind of object, such as "launcher".
    """
    try:
        return entry.load()
    except Exception as failure:
        raise error(
            f"The {what} {entry.name!r} of an installed package cannot be loaded.",
            numbers=f"{described(failure)}; its entry point in {entry.group} is   {entry.name} = {entry.value}",
            hint=f"pip install -U {package_of(entry)}   or   pip uninstall {package_of(entry)}",
        ) from failure


def package_of(entry: EntryPoint) -> str:
    """Return the name under which pip knows the package that offers an entry point."""
    return entry.dist.name if entry.dist else "PACKAGE"


def described(error: BaseException) -> str:
    """Return an error in a user's code as "KeyError: 'x' (path:line)".

    The line is the deepest one that belongs neither to nbkit nor to Python. It is left out if there is none.
    """
    paths = sysconfig.get_paths()
    installed = (paths["purelib"], paths["platlib"])
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN, "<frozen"))
        and (frame.filename.startswith(installed) or not frame.filename.startswith(paths["stdlib"]))
    ]
    return f"{type(error).__name__}: {error}{f' ({places[-1]})' if places else ''}"
