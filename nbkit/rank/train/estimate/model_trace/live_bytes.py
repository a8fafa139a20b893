"""Counts the bytes of the storages that are alive at each moment, operation by operation, as the allocator would."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nbkit.rank.torch_private import tree_leaves
from nbkit.rank.watching_mode import WatchingMode


class LiveBytes(WatchingMode):
    """Within it, `now` is the bytes of all storages that operations have made and that are still there.

    beside: tensors that were there before; their bytes are in `now` too, or not with counted=False. resized: look
    at each operation for memory that comes and goes within the storages of these (zero 3). levels: `now` after each.
    """

    def __init__(self, beside: Iterable[Tensor] = (), *, counted: bool = True, resized: bool = False) -> None:
        super().__init__()
        self.now = 0
        self.levels: list[int] = []
        self._sizes: dict[int, int] = {}
        self._resized: dict[int, Any] | None = {} if resized else None
        for tensor in beside:
            self._see(tensor, counted=counted, there=True)

    @property
    def peak(self) -> int:
        """The most there was after any operation."""
        return max(self.levels, default=self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        for key, itself in list((self._resized or {}).items()):
            storage = itself()
            if storage is not None and storage.nbytes() != self._sizes[key]:
                self.now += storage.nbytes() - self._sizes[key]
                self._sizes[key] = storage.nbytes()
        self.levels.append(self.now)
        return out

    def _see(self, tensor: Tensor, *, counted: bool = True, there: bool = False) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if counted else 0
        self._sizes[key] = size
        self.now += size
        if there and counted and self._resized is not None:
            self._resized[key] = weakref.ref(storage)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        if self._resized is not None:
            self._resized.pop(key, None)
