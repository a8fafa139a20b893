"""Pretend the GPUs that CUDA_VISIBLE_DEVICES names, in each process that has this folder on PYTHONPATH.

`torch.cuda` counts them and chooses one of them for each thread. Tensors stay on the CPU. `accelerator().held` says how
many bytes this process has on each GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar


def visible() -> list[str]:
    return [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]


def pretend(device: Any) -> None:
    """Replace real GPUs by pretended ones. device: the module nbkit.rank.device."""
    import torch

    here = threading.local()

    def choose(index: int) -> None:
        if not 0 <= index < len(visible()):
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {len(visible())}")
        here.index = index

    class BoxAccelerator(device.Accelerator):  # type: ignore[name-defined, misc]
        held: ClassVar[dict[int, int]] = {}

        kind = property(lambda self: "cuda" if visible() else "cpu")

        def count(self) -> int:
            return len(visible())

        def choose(self, index: int) -> None:
            choose(index)

        def chosen(self) -> int:
            return getattr(here, "index", 0)

        def device(self, kind: str) -> torch.device:
            return torch.device("cpu")

        def holds(self, what: Any) -> bool:
            return False

        def uuid(self, device: torch.device) -> str:
            return visible()[self.chosen()] if visible() else ""

        def elsewhere(self, own: int) -> dict[int, int]:
            return {index: size for index, size in self.held.items() if index != own}

    device._accelerator = BoxAccelerator()
    torch.cuda.is_available = lambda: bool(visible())
    torch.cuda.device_count = lambda: len(visible())
    torch.cuda.set_device = lambda which: choose(torch.device(which).index if isinstance(which, str) else int(which))
    torch.cuda.current_device = lambda: getattr(here, "index", 0)


class _AfterImport(MetaPathFinder, Loader):
    """Calls `pretend` when nbkit.rank.device has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "nbkit.rank.device":
            return None
        found = PathFinder.find_spec(name, path)
        assert found is not None
        self._plain = found.loader
        found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._plain is not None
        self._plain.exec_module(module)
        pretend(module)


sys.meta_path.insert(0, _AfterImport())
