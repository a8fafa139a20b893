"""Changes modules of other projects when a program imports them. nbkit itself does not import these modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


class ChangingFinder(MetaPathFinder):
    """Finds each module in `changes` by means of the other finders, and changes it after its code has run."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes
        self._asked: set[str] = set()  # modules that the other finders are looking for now

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.get(fullname)
        if change is None or fullname in self._asked:
            return None
        self._asked.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asked.remove(fullname)
        if spec is not None and spec.loader is not None:
            _change_after(spec, change)
        return spec


def _change_after(spec: ModuleSpec, change: Change) -> None:
    assert spec.loader is not None
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]


def change_when_imported(changes: dict[str, Change]) -> None:
    """Call each change with its module: at once if the module is already imported, else after its import."""
    later = {}
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
        else:
            later[name] = change
    sys.meta_path.insert(0, ChangingFinder(later))
