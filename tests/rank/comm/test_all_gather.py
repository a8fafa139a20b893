"""An all-gather of two ranks over gloo is one exchange of the bytes that gloo sends; of more it is gloo's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from spied_group import on_the_wire

from nbkit.rank.comm import delegating_group
from nbkit.rank.world import sockets
from nbkit.rank.world.world import World

DTYPES = (torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64)


def given(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def every_form(world: World) -> dict[str, bool]:
    warnings.simplefilter("ignore", FutureWarning)
    rank, n, right = world.place.rank, dist.get_world_size(), {}
    whole = torch.cat([given(r) for r in range(n)])
    for dtype in DTYPES:
        dist.all_gather_into_tensor(out := torch.zeros(3 * n, 5, dtype=dtype), given(rank, dtype))
        right[str(dtype)] = torch.equal(out, torch.cat([given(r, dtype) for r in range(n)]))
    rows = torch.zeros(n, 3, 5, dtype=torch.float64)
    rows[rank] = given(rank)
    works = [
        dist.all_gather_into_tensor(rows.view(-1), rows[rank].view(-1), async_op=True),
        dist.all_gather_into_tensor(far := torch.zeros_like(whole), given(rank), async_op=True),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()
    right["in place"] = torch.equal(rows.view(-1, 5), whole)
    right["asynchronous"] = torch.equal(far, whole)
    work = dist.all_gather_into_tensor(polled := torch.zeros_like(whole), given(rank), async_op=True)
    while not work.is_completed():
        pass
    right["polled"] = torch.equal(polled, whole) and work.is_success()
    work = dist.all_gather_into_tensor(later := torch.zeros_like(whole), given(rank), async_op=True)
    work.get_future().wait()
    right["future"] = torch.equal(later, whole)
    dist.all_gather_into_tensor(out := torch.zeros_like(whole), given(rank).t().contiguous().t())
    right["not contiguous"] = torch.equal(out, whole)
    # On one rank alone: what goes over the wire must not depend on how a tensor lies.
    turned = given(rank).t().contiguous().t() if rank == 0 else given(rank)
    dist.all_gather_into_tensor(out := torch.zeros_like(whole), turned)
    right["input not contiguous on one rank"] = torch.equal(out, whole)
    out = torch.zeros(5, 3 * n, dtype=torch.float64).t() if rank == 0 else torch.zeros_like(whole)
    dist.all_gather_into_tensor(out, given(rank))
    right["output not contiguous on one rank"] = torch.equal(out, whole)
    with torch.no_grad():
        dist.all_gather_into_tensor(out := torch.zeros_like(whole), given(rank).requires_grad_())
    right["input with gradient"] = torch.equal(out, whole) and not out.requires_grad
    right["functional"] = torch.equal(funcol.all_gather_tensor(given(rank), 0, dist.group.WORLD) + 0, whole)
    return right


@pytest.mark.parametrize("n", [2, 3])
def test_every_form_gives_the_parts_of_all_ranks(n: int) -> None:
    for right in run_ranks(every_form, n):
        assert [name for name, good in right.items() if not good] == []


def sent(world: World) -> Any:
    out = torch.zeros(3 * dist.get_world_size(), 5, dtype=torch.float64)
    return on_the_wire(lambda group: dist.all_gather_into_tensor(out, given(world.place.rank), group=group))


@pytest.mark.parametrize("n", [2, 3])
def test_it_is_an_exchange_between_two_ranks_and_counted_as_one_all_gather(n: int) -> None:
    for called, heard, count in run_ranks(sent, n):
        assert [call for call in called if call[0] == "alltoall_base"] == [("alltoall_base", 3 * 5 * 8)] * (n == 2)
        assert heard == [("all_gather", "world", 3 * 5 * 8)]
        assert count == 1


def peer_gone(world: World) -> bool:
    if world.place.rank == 1:
        group = dist.group.WORLD
        assert isinstance(group, delegating_group.DelegatingGroup)
        sockets.shut(group.sockets)
        return True
    work = dist.all_gather_into_tensor(torch.empty(2 << 18), torch.zeros(1 << 18), async_op=True)
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


def test_a_broken_exchange_raises() -> None:
    assert run_ranks(peer_gone, 2) == [True, True]
