"""Make nbkit believe that it runs on macOS: Python imports this at its start if PYTHONPATH has this folder.

nbkit's own source is changed when it is compiled: it finds no /proc, no /dev/shm and no prctl, and its platform is
darwin. Functions of os that macOS lacks are removed for all code. Libraries are not imitated: psutil, torch and gloo
are those of this machine, and its loopback interface is called lo.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

CHANGES = {
    b"sys.platform": b"'darwin'",
    b"/proc/": b"/no-proc/",
    b"/dev/shm": b"/no-shm",
    b".prctl(": b".no_prctl(",
    b'"lo0"': b'"lo"',
}
LACKS = (
    "sched_getaffinity", "sched_setaffinity", "waitid", "pidfd_open", "memfd_create", "posix_fadvise", "getresuid",
    "setresuid", "eventfd", "splice",
)  # fmt: skip


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file of nbkit with the changes. Stored bytecode has unchanged source, so it is not read."""

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        path = self.get_filename(fullname)
        source = self.get_data(path)
        for old, new in CHANGES.items():
            source = source.replace(old, new)
        return self.source_to_code(source, path)


class Finder:
    """Finds nbkit's modules in their usual place, and loads them with Loader."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name.partition(".")[0] != "nbkit":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
for _name in LACKS:
    if hasattr(os, _name):
        delattr(os, _name)
