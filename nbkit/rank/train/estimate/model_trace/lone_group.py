"""Stands for a group of ranks where there is one process: operations go, and nothing is sent."""

from __future__ import annotations

from typing import Any

from nbkit.mesh import Mesh
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.process_groups import Connections


class LoneGroup:
    """Number `rank` of `ranks`. For what is computed on shapes, where no number matters."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        """How many ranks it stands for."""
        return self._ranks

    def rank(self) -> int:
        """The place of this one."""
        return self._rank

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Torch waits for what an operation returns, unless that is None."""

    allreduce = broadcast = _nothing
    _allgather_base = _reduce_scatter_base = all_gather_single = reduce_scatter_single = _nothing


def lone_connections(tp: int, cp: int) -> Connections:
    """Of a mesh with these axes: the first rank of tp; the last of cp, whose queries look at the most keys."""
    groups: dict[str, Any] = {"dp": None, "pp": None, "shard": None, "replicate": None}
    groups |= {"tp": LoneGroup(tp) if tp > 1 else None, "cp": LoneGroup(cp, cp - 1) if cp > 1 else None}
    return Connections(Axes(Mesh(tp=tp, cp=cp), 0, 1, groups), {}, (), {})
