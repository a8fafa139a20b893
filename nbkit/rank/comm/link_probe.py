"""Measures the links between the ranks once per world, when its first job is made.

It does not measure when the cluster starts, because a cluster must be ready at once and may never train. All ranks make
a job together, also under torchrun, and other parts of that take longer. The measurement takes some tens of
milliseconds. It runs operations of few bytes and of some megabytes over the group of all ranks, so all ranks send at
the same time, as in a step. Links within a node and between nodes are measured by messages that use only these links.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.planner.link_speed import OperationSpeed, WorldLinks
from nbkit.rank.device import accelerator
from nbkit.wire.processes import node_name

_SMALL, _LARGE, _LARGE_ON_DEVICES = 4 << 10, 2 << 20, 32 << 20
"""The bytes that a rank passes to an operation, for all ranks together."""
_TIMES, _TIMES_SMALL, _UNDER_WAY = 3, 9, 4
"""The number of times that an operation is timed and that a small one is timed, and of operations started at once.

Steps often send many small messages and wait for each, so their latency is timed more often. With a median of three on
ranks that share cores, the latency was up to twice the usual one, and the predicted step a third too long."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_known: WorldLinks | None = None


def link_of(device: torch.device) -> WorldLinks | None:
    """Return the links of this world; None for a single rank. Measures if some rank does not know them. Collective."""
    global _known
    if not dist.is_initialized() or (ranks := dist.get_world_size()) == 1:
        return None
    # A process that joined later (a replaced rank) knows no links. Either all ranks measure again, or none does.
    own = (_known is not None and _known.ranks == ranks, node_name(), _computes_on(device))
    told: list[tuple[bool, str, tuple[object, ...] | None]] = [own] * ranks
    dist.all_gather_object(told, own)
    if not all(knows for knows, _, _ in told):
        hosts = [host for _, host, _ in told]
        names = list(dict.fromkeys(hosts))
        crowded = _crowded(hosts, [units for _, _, units in told], each=1 if accelerator().holds(device) else 2)
        _known = _measured(device, tuple(names.index(host) for host in hosts), crowded)
    return _known


def know(link: WorldLinks | None) -> WorldLinks | None:
    """Use `link`, which other ranks have measured, in a process that joined later. Returns `link`."""
    global _known
    _known = link
    return link


def _measured(device: torch.device, node_of: tuple[int, ...], crowded: bool) -> WorldLinks:
    rank, ranks = dist.get_rank(), len(node_of)
    large = _LARGE_ON_DEVICES if accelerator().holds(device) else _LARGE
    everyone = [1.0] * ranks
    ways = {
        "all_to_all": _way(lambda size: _all_to_all(size, everyone, device), large, (ranks - 1) / ranks, device),
        "all_reduce": _way(lambda size: _reduced(size, device), large, 2 * (ranks - 1) / ranks, device),
        "all_gather": _way(lambda size: _gathered(size // ranks, ranks, device), large, (ranks - 1) / ranks, device),
        "reduce_scatter": _way(lambda size: _scattered(size, ranks, device), large, (ranks - 1) / ranks, device),
    }
    # Send to the next rank and receive from the previous one, as pipeline stages do.
    after = [float(other == (rank + 1) % ranks) for other in range(ranks)]
    before = [float(other == (rank - 1) % ranks) for other in range(ranks)]
    ways["send"] = _way(lambda size: _all_to_all(size // ranks, after, device, before), large, 1 / ranks, device)
    near = far = None
    if len(set(node_of)) > 1:
        same = [float(node == node_of[rank]) for node in node_of]
        share = (sum(same) - 1) / ranks
        near = _way(lambda size: _all_to_all(size, same, device), large, _most(share, device), device)
        to, of = ([float(one) for one in ends] for ends in _neighbours(node_of, rank))
        far = _way(lambda size: _all_to_all(size // 2, to, device, of), large, 1 / 2, device)
    return WorldLinks(ranks, ways, near, far, _copying(large, device), node_of, crowded)


def _neighbours(node_of: Sequence[int], rank: int) -> tuple[list[bool], list[bool]]:
    """Return two lists: for each rank, whether `rank` sends to it, and whether `rank` receives from it.

    Each rank sends to the rank with the same position on the next node, as in groups with one rank on each node. An
    all-to-all between nodes would have messages that cross, which take longer.
    """
    places = [[other for other, at in enumerate(node_of) if at == node] for node in sorted(set(node_of))]
    after: dict[int, int] = {}
    for here, there in zip(places, [*places[1:], places[0]], strict=True):
        after |= {one: there[i % len(there)] for i, one in enumerate(here)}
    return [after[rank] == other for other in range(len(node_of))], [
        after[other] == rank for other in range(len(node_of))
    ]


_Act = Callable[..., Any]
"""A function that runs an operation and waits for it. With async_op=True it returns the handle instead."""


def _way(make: Callable[[int], _Act], large: int, sent: float, device: torch.device) -> OperationSpeed:
    """Measure an operation. All ranks return the times of the slowest rank. Collective.

    sent: the fraction of the operation's bytes that a rank sends.
    """
    # Each part is a multiple of four bytes, for any number of ranks.
    unit = 4 * dist.get_world_size()
    small, whole = (make(max(size // unit, 1) * unit) for size in (_SMALL, large))
    times = _timed(small, device, _TIMES_SMALL), _timed(whole, device), _timed(lambda: _at_once(small), device)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    short, long, several = slowest.tolist()
    gap = min(max((several - short) / (_UNDER_WAY - 1), 0.0), short)
    # If even the large operation ends at once, this is only a lower bound of the bandwidth.
    return OperationSpeed(short, max(large * sent, 1.0) / max(long - short, 0.05 * long, 1e-9), gap)


def _at_once(act: _Act) -> None:
    """Start several operations, then wait for all of them."""
    for work in [act(async_op=True) for _ in range(_UNDER_WAY)]:
        work.wait()


def _timed(act: Callable[[], object], device: torch.device, times: int = _TIMES) -> float:
    """Return the median seconds of `times` runs of `act`. An extra first run opens the connections."""
    seconds = []
    for _ in range(1 + times):
        _wait(device)
        began = time.perf_counter()
        act()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[times // 2]


def _wait(device: torch.device) -> None:
    if accelerator().holds(device):
        accelerator().wait_for_all(device)


def _all_to_all(size: int, to: list[float], device: torch.device, of: list[float] | None = None) -> _Act:
    """Return an all-to-all that sends `size` bytes in equal parts to the ranks for which `to` is 1.

    of: 1 for each rank to receive from; the same as `to` by default.
    """
    given = [int(one) * (size // (len(to) if of is None else 1)) for one in to]
    taken = given if of is None else [int(one) * size for one in of]
    outgoing, incoming = _flat(sum(given), device), _flat(sum(taken), device)
    return partial(dist.all_to_all_single, incoming, outgoing, taken, given)


def _reduced(size: int, device: torch.device) -> _Act:
    flat = _flat(size, device).view(torch.float32)
    return partial(dist.all_reduce, flat)


def _gathered(size: int, ranks: int, device: torch.device) -> _Act:
    part, whole = _flat(size, device), _flat(size * ranks, device)
    return partial(_all_gather, whole, part)


def _scattered(size: int, ranks: int, device: torch.device) -> _Act:
    whole = _flat(size, device).view(torch.float32)
    part = whole.new_zeros(whole.numel() // ranks)
    return partial(_reduce_scatter, part, whole)


def _flat(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _copying(size: int, device: torch.device) -> float:
    """Return the bytes per second of copies into new memory while all ranks copy. Collective.

    All ranks return the speed of the slowest rank.
    """
    source = torch.ones(4 * size, dtype=torch.uint8, device=device)
    dist.barrier()
    seconds = torch.tensor([_timed(source.clone, device)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return source.numel() / max(float(seconds), 1e-9)


def _most(share: float, device: torch.device) -> float:
    """Return the largest `share` of any rank, because nodes may differ in size. Collective."""
    most = torch.tensor([share], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _computes_on(device: torch.device) -> tuple[object, ...] | None:
    """Return the GPU of this rank, or its CPU cores; None if the system does not report them."""
    if accelerator().holds(device):
        return (accelerator().uuid(device) or str(device),)
    try:
        return tuple(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return None


def _crowded(hosts: list[str], units: list[tuple[object, ...] | None], *, each: int) -> bool:
    """Return True if some node has fewer than `each` GPUs (or cores) per rank, or if this is unknown.

    A CPU rank needs two cores, because its sending thread uses as much of a core as it gets. How much that is has not
    been measured.
    """
    for host in set(hosts):
        here = [own for name, own in zip(hosts, units, strict=True) if name == host]
        if any(own is None for own in here) or len({unit for own in here for unit in own or ()}) < each * len(here):
            return True
    return False
