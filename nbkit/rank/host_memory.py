"""Finds how much more memory this host's processes can take, by the kernel and by the tightest cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""A limit of at least this many bytes means no limit. cgroup version 1 writes a number near 2^63 for it."""


def free_on_host() -> int | None:
    """Return how many more bytes this host's processes can take together; None if unknown."""
    return min((free for free in (of_machine(), of_cgroups()) if free is not None), default=None)


def of_machine() -> int | None:
    """Return the bytes that the kernel can provide without swapping."""
    return int(psutil.virtual_memory().available)


def of_cgroups(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left in the tightest of this process's cgroups (version 1 or 2); None if there is no limit.

    Inactive file pages count as free: the kernel reclaims them before it refuses memory.
    """
    return min((max(free, 0) for free in _each_cgroup(proc, mounted)), default=None)


def _each_cgroup(proc: Path, mounted: Path) -> Iterator[int]:
    for line in _read(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        own = top / path.lstrip("/")
        # A container sees its own group at the top of the tree, whatever the group's path is outside.
        for folder in dict.fromkeys([own, *(each for each in own.parents if each.is_relative_to(top)), top]):
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit() and int(most) < _UNLIMITED:
                yield (
                    int(most)
                    - int(used)
                    + _idle_files(folder, "total_inactive_file" if controllers else "inactive_file")
                )


def _idle_files(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
