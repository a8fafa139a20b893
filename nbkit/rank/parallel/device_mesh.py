"""The process groups of a mesh, for one rank. A group is created once and reused by every later strategy."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from nbkit.mesh import AXES, BETWEEN, WITHIN, Mesh, levels_of
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.comm.background_creation import forming
from nbkit.rank.comm.delegating_group import Broken, DelegatingGroup
from nbkit.rank.comm.group_creation import abort
from nbkit.rank.torch_private import group_tables

MakeGroup = Callable[[str, list[tuple[int, ...]], int], dist.ProcessGroup | None]
"""See `group_of`."""

GroupKey = tuple[str, tuple[int, ...], int]
"""The key of a group: (axis, its ranks in the world, how often groups had been forgotten when it was created)."""

_made: dict[GroupKey, dist.ProcessGroup] = {}
_forgotten = 0
"""The number of times that groups were forgotten; see `forget`."""


_made_in: weakref.ref[dist.ProcessGroup] | None = None


def _forget_destroyed() -> None:
    """Forget the groups of an earlier default group. User code has destroyed them with it, on all ranks."""
    global _made_in
    default: Any = dist.group.WORLD
    if _made_in is None or _made_in() is not default:
        if _made_in is not None:
            _made.clear()
        _made_in = weakref.ref(default)


def key_of(axis: str, ranks: tuple[int, ...]) -> GroupKey:
    """Return the key of the group that `group_of` would create or find now."""
    return axis, ranks, _forgotten


def group_of(axis: str, every: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """Return this rank's group among `every`, or None if it is alone or in no group. All ranks of the world must call
    it.

    Every rank creates the same groups in the same order, including groups without this rank, because torch requires it.
    """
    _forget_destroyed()
    own: dist.ProcessGroup | None = None
    for ranks in every:
        if len(ranks) == 1:
            continue
        key = key_of(axis, ranks)
        if key not in _made:
            # On a device, do not add a gloo backend, whose ranks would all connect to each other without use.
            _made[key] = dist.new_group(list(ranks), backend=dist.get_backend(), group_desc=axis)
        if rank in ranks:
            own = _made[key]
    return own


def all_made(keys: Collection[GroupKey]) -> bool:
    """Return True if all these groups exist. Then `group_of` sends nothing for them."""
    _forget_destroyed()
    return all(key in _made for key in keys)


def close_all_but(kept: Collection[GroupKey], device: torch.device) -> None:
    """Close the groups that no rank keeps. They are created again when needed. All ranks of the world must call it.

    No operation may be running in them. kept: the groups that this rank keeps. All ranks close the same groups in one
    order, because a communicator may end only when all of its members end it. If some ranks do not have a forgotten
    group, it was never used, so these ranks are not asked.
    """
    own = sorted(_made.keys() - set(kept))
    told = frozenset(own), _made.keys() & set(kept)
    everyone = all_gather_objects(told, world_size=dist.get_world_size(), device=device)
    for key in own:
        everywhere = all(key in left for left, _ in everyone)
        forgotten = key[-1] < _forgotten and not any(key in held for _, held in everyone)
        if everywhere or forgotten:
            group = _made.pop(key)
            if not everywhere and isinstance(group, DelegatingGroup):
                abort([group])
            _close(group)


def close_all() -> None:
    """Close all groups, because new processes have replaced some ranks and do not have them. Sends nothing.

    A group without such a process would otherwise be formed again, without use, whenever another rank dies.
    """
    global _forgotten
    for key in sorted(_made):
        _close(_made.pop(key))
    _forgotten = 0  # like a new rank


def _close(group: dist.ProcessGroup) -> None:
    if isinstance(group, DelegatingGroup) and group in group_tables.pg_map:
        dist.destroy_process_group(group)
        group.drop(Broken(f"Process group {group.label} was closed: no strategy uses it any more."))


def groups_made() -> int:
    """Return a number that is equal on ranks that have created the same groups. Call it when no group is being created.

    An interrupt may reach one rank before it has created a group, and another rank after that.
    """
    forming.join()
    _forget_destroyed()
    made = sorted(key for key in _made if key[-1] == _forgotten)
    return zlib.crc32(repr((made, group_tables.group_count)).encode())


def forget(device: torch.device) -> None:
    """Give later strategies new groups. Existing groups serve their holders until `close_all_but`.

    All ranks must call it. torch names a group by a counter that must be equal on all ranks. This call makes it equal.
    """
    global _forgotten
    _forgotten += 1
    if dist.get_world_size() > 1:
        counts = torch.tensor([group_tables.group_count, _forgotten], device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        group_tables.group_count, _forgotten = counts.tolist()


def groups_along(
    mesh: Mesh, shard: int | None, *, summed: str = "", node_of: Sequence[int] = (), ep: int = 1
) -> dict[str, list[tuple[int, ...]]]:
    """Return axis -> all its groups. The two parts of dp are included only if both are smaller than dp.

    summed: the axis along which gradients are all-reduced. If its groups have ranks on several nodes, its two levels
    are included too. ep: the number of ranks that share experts. If it is greater than 1, "ep" has their groups, and
    "edp" the groups of ranks that hold the same experts. node_of: see `levels_of`.
    """
    found = {axis: mesh.groups(axis) for axis in AXES}
    if shard not in (None, 1, mesh.dp):
        found["shard"], found["replicate"] = mesh.shard_groups(shard)
    if ep > 1:
        found["ep"], found["edp"] = mesh.shard_groups(ep)
    levels = [levels for group in found.get(summed, ()) if (levels := levels_of(group, node_of)) is not None]
    if levels:
        found[f"{summed} {WITHIN}"] = [ranks for one in levels for ranks in one.within]
        found[f"{summed} {BETWEEN}"] = [ranks for one in levels for ranks in one.between]
    return found


@dataclass(frozen=True)
class LevelGroups:
    """The two levels of an all-reduce, for one rank. Each group has at least two ranks."""

    within: dist.ProcessGroup
    between: dist.ProcessGroup


@dataclass(frozen=True)
class Axes:
    """The groups, degrees and positions of one rank.

    Axes are pp, dp, cp, tp, and the two parts of dp: shard and replicate for ZeRO, ep and edp for experts.
    """

    mesh: Mesh
    rank: int
    shard: int
    _groups: dict[str, dist.ProcessGroup | None]
    ep: int = 1

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        rank: int,
        *,
        shard: int | None = None,
        summed: str = "",
        node_of: Sequence[int] = (),
        along: Mapping[str, list[tuple[int, ...]]] | None = None,
        make: MakeGroup | None = None,
        ep: int = 1,
    ) -> Axes:
        """Create the groups that do not exist yet. All ranks of the world must call it.

        shard: the number of ranks in a sharding group (default: dp). summed, node_of, ep: see `groups_along`. along:
        the result of `groups_along`, if it is known.
        """
        shard, make = mesh.dp if shard is None else shard, make or group_of
        along = groups_along(mesh, shard, summed=summed, node_of=node_of, ep=ep) if along is None else along
        groups = {axis: make(axis, every, rank) for axis, every in along.items()}
        if shard in (1, mesh.dp):
            groups["shard"], groups["replicate"] = (groups["dp"], None) if shard == mesh.dp else (None, groups["dp"])
        return cls(mesh, rank, shard, groups, ep)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of this rank along `axis`, or None if it is alone there."""
        return self._groups[axis]

    def used(self) -> list[dist.ProcessGroup | None]:
        """Return this rank's groups in which a step runs collectives; None for axes along which this rank is alone.

        The axes are the same, and in the same order, on all ranks. A pipeline on devices runs no collectives along pp.
        """
        halved = self.shard not in (1, self.mesh.dp)
        axes = {*AXES} - {"dp", "pp"} | ({"shard", "replicate"} if halved else {"dp"})
        axes |= {"ep", "edp"} if self.ep > 1 else set()
        levels = {f"{axis} {level}" for axis in axes for level in (WITHIN, BETWEEN)} & self._groups.keys()
        axes = levels | {axis for axis in axes if f"{axis} {WITHIN}" not in levels}
        return [self._groups.get(axis) for axis in sorted(axes)]

    def levels(self, axis: str) -> LevelGroups | None:
        """Return the two levels of an all-reduce along `axis`, or None if it has only one."""
        within, between = self._groups.get(f"{axis} {WITHIN}"), self._groups.get(f"{axis} {BETWEEN}")
        return None if within is None or between is None else LevelGroups(within, between)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        if axis in ("shard", "replicate"):
            return self.shard if axis == "shard" else self.mesh.dp // self.shard
        if axis in ("ep", "edp"):
            return self.ep if axis == "ep" else self.mesh.dp // self.ep
        return self.mesh.degree(axis)

    def index(self, axis: str) -> int:
        """Return the position of this rank along `axis`."""
        if axis in ("shard", "replicate"):
            dp = self._place["dp"]
            return dp % self.shard if axis == "shard" else dp // self.shard
        if axis in ("ep", "edp"):
            return self._place["dp"] % self.ep if axis == "ep" else self._place["dp"] // self.ep
        return self._place[axis]

    @cached_property
    def _place(self) -> dict[str, int]:
        return self.mesh.index(self.rank)  # cached, because every micro-batch uses it
