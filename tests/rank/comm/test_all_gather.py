"""An all-gather of two ranks over gloo is one exchange of the bytes that gloo sends; of more it is gloo's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks

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
    with torch.no_grad():
        dist.all_gather_into_tensor(out := torch.zeros_like(whole), given(rank).requires_grad_())
    right["input with gradient"] = torch.equal(out, whole) and not out.requires_grad
    right["functional"] = torch.equal(funcol.all_gather_tensor(given(rank), 0, dist.group.WORLD) + 0, whole)
    return right


@pytest.mark.parametrize("n", [2, 3])
def test_every_form_gives_the_parts_of_all_ranks(n: int) -> None:
    for right in run_ranks(every_form, n):
        assert [name for name, good in right.items() if not good] == []


class Spy:
    """An inner group that tells which of its methods are called."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.called = inner, []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.inner, name)
        if not callable(own) or name in ("size", "rank", "_get_backend"):
            return own

        def call(*args: Any) -> Any:
            self.called.append(name)
            return own(*args)

        return call


def on_the_wire(world: World) -> Any:
    group = dist.group.WORLD
    assert isinstance(group, delegating_group.DelegatingGroup)
    group.inner = spy = Spy(group.inner)
    heard: list[Any] = []
    delegating_group.listeners.append(lambda *told: heard.append(told))
    before, n = group.count, dist.get_world_size()
    dist.all_gather_into_tensor(torch.zeros(3 * n, 5, dtype=torch.float64), given(world.place.rank))
    return set(spy.called) & {"alltoall_base"}, heard, group.count - before


@pytest.mark.parametrize("n", [2, 3])
def test_it_is_an_exchange_between_two_ranks_and_counted_as_one_all_gather(n: int) -> None:
    for called, heard, count in run_ranks(on_the_wire, n):
        assert called == ({"alltoall_base"} if n == 2 else set())
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
