"""The links between the ranks, measured once per world: when its first job is made.

Not when the cluster starts, which is to be ready at once and may never train; a job is made by all ranks together,
under torchrun too, and waits for slower things. Some tens of milliseconds: operations of hardly any bytes and of some
megabytes over the group of all ranks, so that everybody sends at the same time, as in a step. Ways within and between
nodes are told apart by what goes only there.
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
"""Bytes that a rank hands over, of each of the others' parts together."""
_TIMES, _TIMES_SMALL, _UNDER_WAY = 3, 9, 4
"""How often operations are timed. What steps send is often many small ones, each of which is waited for: the median of
three was up to twice the usual latency where ranks share cores, and a step predicted with it a third too long."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_known: WorldLinks | None = None


def link_of(device: torch.device) -> WorldLinks | None:
    """The link of this world, measured now if some rank does not know it. Collective. None in a world of one."""
    global _known
    if not dist.is_initialized() or (ranks := dist.get_world_size()) == 1:
        return None
    # A process that joined later (a repaired rank) knows nothing: all measure again, or none.
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
    """Take over what the other ranks have measured: this process joins them later."""
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
    # To the next rank and from the one before, as stages of a pipeline do.
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
    """To whom `rank` sends, and from whom it gets: each rank sends to the one in its place on the next node, as groups
    with a rank on each node do. An all-to-all between nodes has messages that cross, which take longer."""
    places = [[other for other, at in enumerate(node_of) if at == node] for node in sorted(set(node_of))]
    after: dict[int, int] = {}
    for here, there in zip(places, [*places[1:], places[0]], strict=True):
        after |= {one: there[i % len(there)] for i, one in enumerate(here)}
    return [after[rank] == other for other in range(len(node_of))], [
        after[other] == rank for other in range(len(node_of))
    ]


_Act = Callable[..., Any]
"""Makes an operation: waits for it, or with async_op=True returns it."""


def _way(make: Callable[[int], _Act], large: int, sent: float, device: torch.device) -> OperationSpeed:
    """sent: the part of the bytes handed over that leaves a rank. Collective; the slowest rank's times, on all."""
    # Parts of whole numbers of four bytes, also over three ranks.
    unit = 4 * dist.get_world_size()
    small, whole = (make(max(size // unit, 1) * unit) for size in (_SMALL, large))
    times = _timed(small, device, _TIMES_SMALL), _timed(whole, device), _timed(lambda: _at_once(small), device)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    short, long, several = slowest.tolist()
    gap = min(max((several - short) / (_UNDER_WAY - 1), 0.0), short)
    # Where even the large ones are over at once, nothing is known but that.
    return OperationSpeed(short, max(large * sent, 1.0) / max(long - short, 0.05 * long, 1e-9), gap)


def _at_once(act: _Act) -> None:
    """Several that are begun before the first is waited for."""
    for work in [act(async_op=True) for _ in range(_UNDER_WAY)]:
        work.wait()


def _timed(act: Callable[[], object], device: torch.device, times: int = _TIMES) -> float:
    """Seconds of `act`, the median of a few, after one that meets whom it has not met."""
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
    """`size` bytes in equal parts to the ranks for which `to` is 1 (of: from which; default the same)."""
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
    """Return bytes per second into fresh memory, all ranks at once; the slowest rank's, on all. Collective."""
    source = torch.ones(4 * size, dtype=torch.uint8, device=device)
    dist.barrier()
    seconds = torch.tensor([_timed(source.clone, device)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return source.numel() / max(float(seconds), 1e-9)


def _most(share: float, device: torch.device) -> float:
    """Return the largest share of any rank: nodes need not be of one size. Collective."""
    most = torch.tensor([share], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _computes_on(device: torch.device) -> tuple[object, ...] | None:
    """Return the GPU of this rank, or its cores; None where nobody says."""
    if accelerator().holds(device):
        return (accelerator().uuid(device) or str(device),)
    try:
        return tuple(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return None


def _crowded(hosts: list[str], units: list[tuple[object, ...] | None], *, each: int) -> bool:
    """Return True if the ranks of some node have fewer than `each` GPUs, or cores, together for one; also where nobody
    knows.

    A CPU rank wants two cores: what sends takes as much of one as it gets, and how much that is no clock has measured.
    """
    for host in set(hosts):
        here = [own for name, own in zip(hosts, units, strict=True) if name == host]
        if any(own is None for own in here) or len({unit for own in here for unit in own or ()}) < each * len(here):
            return True
    return False
