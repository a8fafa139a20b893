"""Private symbols of other libraries: what nbkit uses each one for, and what changes if it is missing.

Libraries change their private symbols without notice. Each one that nbkit uses is listed, in rank/torch_private.py or
jupyter_private.py. A symbol that is missing, or that takes other arguments, degrades one feature; it never prevents a
start. `nbkit doctor` prints the sentences.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

from nbkit.errors import ClusterError

LACKING = "lacking.json"
"""A file in a cluster's folder: a list of sentences, one for each symbol that the parent of the ranks did not find."""


@dataclass(frozen=True)
class Symbol:
    """A private symbol of a library.

    path: "module:name" or "module:Class.name"; "()" calls the function whose name stands before it.
    purpose: what nbkit does with it. without: what works differently, or does not work, if it is missing.
    parameters: names that its signature must have, if the signature can be read. at_use: True for an attribute that is
    set late and cannot be checked before its use. The code that uses it handles its absence.
    """

    path: str
    purpose: str
    without: str
    parameters: tuple[str, ...] = ()
    at_use: bool = False

    @property
    def name(self) -> str:
        """Return the last part of the path: "_get_backend" for "torch.distributed:ProcessGroup._get_backend"."""
        return self.path.rpartition(".")[2].rpartition(":")[2]

    def resolve(self) -> Any:
        """Return the object that the path names.

        Raise ImportError or AttributeError if it is missing, TypeError if it takes other arguments.
        """
        module, _, names = self.path.partition(":")
        found: Any = importlib.import_module(module)
        for name in filter(None, names.split(".")):
            found = getattr(found, name.removesuffix("()"))
            found = found() if name.endswith("()") else found
        if self.parameters:
            self._check_parameters(found)
        return found

    def _check_parameters(self, found: Any) -> None:
        try:
            taken = inspect.signature(found).parameters
        except ValueError:
            return  # a function made in C++, whose signature cannot be read
        lacking = [name for name in self.parameters if name not in taken]
        if lacking:
            raise TypeError(f"it takes no {', '.join(lacking)}")

    def problem(self) -> str:
        """Return a sentence if this symbol is missing or has changed; "" if it is as expected."""
        if self.at_use:
            return ""
        try:
            self.resolve()
        except (ImportError, AttributeError):
            return self._sentence("has no", "")
        except TypeError as error:
            return self._sentence("has another", f" ({error})")
        return ""

    def _sentence(self, how: str, why: str) -> str:
        library = self.path.partition(":")[0].partition(".")[0]
        shown = self.path.replace(":", ".").replace("()", "")
        what = f"{library} {_version(library)} {how} {shown}{why}"
        return f"{what}. nbkit uses it to {self.purpose}. Without it, {self.without}."


class Missing:
    """A stand-in for a symbol without a plain fallback. Every use of it raises ClusterError."""

    def __init__(self, symbol: Symbol) -> None:
        self._symbol = symbol

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ClusterError(
            self._symbol.problem() or f"{self._symbol.path} cannot be used.",
            hint="nbkit doctor lists the versions that were tested",
        )


def listed(owner: str, names: str, purpose: str, without: str, *, at_use: bool = False) -> list[Symbol]:
    """Return a Symbol for each of `names`. owner: a module ("torch.utils.checkpoint:") or a class ("torch:Tensor.")."""
    return [Symbol(f"{owner}{name}", purpose, without, at_use=at_use) for name in names.split()]


def problems(symbols: Iterable[Symbol], *, imported: bool = False) -> list[str]:
    """Return one sentence for each of `symbols` that is missing or has changed in the installed library.

    imported: only look at modules that this process has imported already, since an import takes seconds.
    """
    return [
        sentence
        for symbol in symbols
        if (not imported or symbol.path.partition(":")[0] in sys.modules) and (sentence := symbol.problem())
    ]


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
