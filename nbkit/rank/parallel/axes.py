"""The process groups of a mesh, as seen from one rank. A group is made once and serves every later strategy."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch.distributed as dist

from nbkit.mesh import AXES, Mesh

__all__ = ["Axes", "forget", "group_of", "groups_made", "shard_groups"]

_made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}


def group_of(axis: str, every: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """This rank's group among `every`, None when it would be alone (or is in none). Collective over the world.

    Every rank makes the same groups in the same order, also those it is not in: torch wants that.
    """
    own: dist.ProcessGroup | None = None
    for ranks in every:
        if len(ranks) == 1:
            continue
        if (axis, ranks) not in _made:
            _made[axis, ranks] = dist.new_group(list(ranks), group_desc=axis)
        if rank in ranks:
            own = _made[axis, ranks]
    return own


def groups_made() -> int:
    """A number that ranks have in common which have made the same groups.

    An interrupt may have reached one rank before a group was made and another after it.
    """
    return zlib.crc32(repr(sorted(_made)).encode())


def forget() -> None:
    """Later strategies get groups of their own. On every rank, or they would wait for each other."""
    _made.clear()


def shard_groups(mesh: Mesh, shard: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(sharding groups of `shard` neighbours along dp, groups of those who hold the same shard)."""
    within, across = [], []
    for ranks in mesh.groups("dp"):
        within += [ranks[i : i + shard] for i in range(0, len(ranks), shard)]
        across += [ranks[i::shard] for i in range(shard)]
    return within, across


@dataclass(frozen=True)
class Axes:
    """Groups, degrees and places of one rank. Axes: pp, dp, cp, tp, and the halves of dp: shard and replicate."""

    mesh: Mesh
    rank: int
    shard: int
    _groups: dict[str, dist.ProcessGroup | None]

    @classmethod
    def of(cls, mesh: Mesh, rank: int, *, shard: int | None = None) -> Axes:
        """Make what is not there yet. Collective over the world. shard: ranks of a sharding group (default: dp)."""
        shard = mesh.dp if shard is None else shard
        groups = {axis: group_of(axis, mesh.groups(axis), rank) for axis in AXES}
        if shard in (1, mesh.dp):
            groups["shard"], groups["replicate"] = (groups["dp"], None) if shard == mesh.dp else (None, groups["dp"])
        else:
            within, across = shard_groups(mesh, shard)
            groups["shard"], groups["replicate"] = group_of("shard", within, rank), group_of("replicate", across, rank)
        return cls(mesh, rank, shard, groups)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of this rank along `axis`, None when it is alone there."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        if axis in ("shard", "replicate"):
            return self.shard if axis == "shard" else self.mesh.dp // self.shard
        return self.mesh.degree(axis)

    def index(self, axis: str) -> int:
        """The place of this rank along `axis`."""
        dp = self.mesh.index(self.rank)["dp"]
        if axis in ("shard", "replicate"):
            return dp % self.shard if axis == "shard" else dp // self.shard
        return self.mesh.index(self.rank)[axis]
