"""The CPU cores this process may use, and how they are shared out among ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nbkit.errors import UsageError

_CGROUP = Path("/sys/fs/cgroup")


def cores_here() -> tuple[int, ...]:
    """The cores this process may use, hardware threads of one physical core side by side.

    Contiguous blocks of it then never split a physical core between two ranks, where the numbers come out even.
    """
    try:
        cores = os.sched_getaffinity(0)
    except AttributeError:  # macOS
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(cores, key=lambda core: (_first_sibling(core), core)))


def quota_here(cgroup: Path = _CGROUP) -> float | None:
    """Cores' worth of time that a container grants (Kubernetes: limits.cpu), None without such a limit.

    Affinity does not show it: a pod with a limit of 4 sees all cores of its node.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file; "max"
        return None


def share_cores(count: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """`count` contiguous blocks, the first ones a core larger where it does not come out even.

    More ranks than cores: rank i has core i % cores. Raises UsageError without a core.
    """
    if not cores:
        raise UsageError("No CPU core to run on.", numbers="0 cores in this process's affinity")
    if count > len(cores):
        return [(cores[rank % len(cores)],) for rank in range(count)]
    size, larger = divmod(len(cores), count)
    ends = [(rank + 1) * size + min(rank + 1, larger) for rank in range(count)]
    return [tuple(cores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def share_cores_near(near: Sequence[Sequence[int]], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """`share_cores` among the ranks whose GPUs are on one socket, of the cores of that socket; near: those, by rank.

    As if no socket were known where one has no core here, fewer than its ranks, or shares cores with another.
    """
    sockets = {frozenset(each) & frozenset(cores) for each in near}
    ranks_at = {socket: [rank for rank, each in enumerate(near) if socket == frozenset(each) & frozenset(cores)]
                for socket in sockets}  # fmt: skip
    apart = sum(map(len, sockets)) == len(frozenset().union(*sockets))
    if not apart or any(len(socket) < len(ranks) for socket, ranks in ranks_at.items()):
        return share_cores(len(near), cores)
    shares: dict[int, tuple[int, ...]] = {}
    for socket, ranks in ranks_at.items():
        own = [core for core in cores if core in socket]
        shares.update(zip(ranks, share_cores(len(ranks), own), strict=True))
    return [shares[rank] for rank in range(len(near))]


def show_cores(cores: Sequence[int]) -> str:
    """For people: "core 3", "cores 0-3,8-11"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"core {text}" if len(cores) == 1 else f"cores {text}"


def _first_sibling(core: int) -> int:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core
