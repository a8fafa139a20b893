"""Test that an all-gather of two gloo ranks is one exchange, and a reduce-scatter sends half of what gloo's sends."""

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


def part_of(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def all_gathers(world: World) -> dict[str, bool]:
    warnings.simplefilter("ignore", FutureWarning)
    rank, n, right = world.place.rank, dist.get_world_size(), {}
    whole = torch.cat([part_of(r) for r in range(n)])
    for dtype in DTYPES:
        dist.all_gather_into_tensor(out := torch.zeros(3 * n, 5, dtype=dtype), part_of(rank, dtype))
        right[str(dtype)] = torch.equal(out, torch.cat([part_of(r, dtype) for r in range(n)]))
    rows = torch.zeros(n, 3, 5, dtype=torch.float64)
    rows[rank] = part_of(rank)
    works = [
        dist.all_gather_into_tensor(rows.view(-1), rows[rank].view(-1), async_op=True),
        dist.all_gather_into_tensor(far := torch.zeros_like(whole), part_of(rank), async_op=True),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()
    right["in place"] = torch.equal(rows.view(-1, 5), whole)
    right["asynchronous"] = torch.equal(far, whole)
    work = dist.all_gather_into_tensor(polled := torch.zeros_like(whole), part_of(rank), async_op=True)
    while not work.is_completed():
        pass
    right["polled"] = torch.equal(polled, whole) and work.is_success()
    work = dist.all_gather_into_tensor(later := torch.zeros_like(whole), part_of(rank), async_op=True)
    work.get_future().wait()
    right["future"] = torch.equal(later, whole)
    dist.all_gather_into_tensor(out := torch.zeros_like(whole), part_of(rank).t().contiguous().t())
    right["not contiguous"] = torch.equal(out, whole)
    # Only rank 0 passes a tensor that is not contiguous, because messages must not depend on the layout in memory.
    turned = part_of(rank).t().contiguous().t() if rank == 0 else part_of(rank)
    dist.all_gather_into_tensor(out := torch.zeros_like(whole), turned)
    right["input not contiguous on one rank"] = torch.equal(out, whole)
    out = torch.zeros(5, 3 * n, dtype=torch.float64).t() if rank == 0 else torch.zeros_like(whole)
    dist.all_gather_into_tensor(out, part_of(rank))
    right["output not contiguous on one rank"] = torch.equal(out, whole)
    with torch.no_grad():
        dist.all_gather_into_tensor(out := torch.zeros_like(whole), part_of(rank).requires_grad_())
    right["input with gradient"] = torch.equal(out, whole) and not out.requires_grad
    right["functional"] = torch.equal(funcol.all_gather_tensor(part_of(rank), 0, dist.group.WORLD) + 0, whole)
    return right


@pytest.mark.parametrize("n", [2, 3])
def test_every_form_of_all_gather_returns_the_parts_of_all_ranks(n: int) -> None:
    for right in run_ranks(all_gathers, n):
        assert [name for name, good in right.items() if not good] == []


def all_gather_sent(world: World) -> Any:
    out = torch.zeros(3 * dist.get_world_size(), 5, dtype=torch.float64)
    return on_the_wire(lambda group: dist.all_gather_into_tensor(out, part_of(world.place.rank), group=group))


@pytest.mark.parametrize("n", [2, 3])
def test_an_all_gather_of_two_ranks_is_one_exchange_and_counts_as_one_all_gather(n: int) -> None:
    for called, heard, count in run_ranks(all_gather_sent, n):
        assert [call for call in called if call[0] == "alltoall_base"] == [("alltoall_base", 3 * 5 * 8)] * (n == 2)
        assert heard == [("all_gather", "world", 3 * 5 * 8)]
        assert count == 1


OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def given(rank: int, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2 * n, 5, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def expected(rank: int, n: int, op: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    every = torch.stack([given(r, n, dtype) for r in range(n)])
    whole = {
        "sum": every.sum(0, dtype=dtype),
        "max": every.amax(0),
        "min": every.amin(0),
        "product": every.prod(0, dtype=dtype),
    }
    whole["avg"] = whole["sum"] / n
    return whole[op].chunk(n)[rank].to(dtype)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, rtol=1e-2 if wanted.dtype == torch.bfloat16 else 1e-14, atol=0))


def reduce_scatters(world: World) -> dict[str, bool]:
    warnings.simplefilter("ignore", FutureWarning)
    rank, n, right = world.place.rank, dist.get_world_size(), {}
    for name, op in OPS.items():
        out = torch.empty(2, 5, dtype=torch.float64)
        dist.reduce_scatter_tensor(out, given(rank, n), op=op)
        right[f"tensor {name}"] = near(out, expected(rank, n, name))
        out = torch.empty(2, 5, dtype=torch.float64)
        dist.reduce_scatter(out, list(given(rank, n).chunk(n)), op=op)
        right[f"list {name}"] = near(out, expected(rank, n, name))
    for dtype in (torch.bfloat16, torch.int32):
        out = torch.empty(2, 5, dtype=dtype)
        dist._reduce_scatter_base(out, given(rank, n, dtype))
        right[f"base {dtype}"] = near(out, expected(rank, n, "sum", dtype))
    # One output is a part of its input, as NCCL allows, and the rank waits for the works out of order.
    mine, other = given(rank, n), given(rank, n)
    works = [
        dist.reduce_scatter_tensor(mine[2 * rank : 2 * rank + 2], mine, async_op=True),
        dist.reduce_scatter_tensor(far := torch.empty(2, 5, dtype=torch.float64), other, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()
    right["in place"] = near(mine[2 * rank : 2 * rank + 2], expected(rank, n, "sum"))
    right["asynchronous"] = near(far, expected(rank, n, "sum"))
    work = dist.reduce_scatter_tensor(polled := torch.empty(2, 5, dtype=torch.float64), given(rank, n), async_op=True)
    while not work.is_completed():
        pass
    right["polled"] = near(polled, expected(rank, n, "sum")) and work.is_success() and work.exception() is None
    work = dist.reduce_scatter_tensor(later := torch.empty(2, 5, dtype=torch.float64), given(rank, n), async_op=True)
    (value,) = work.get_future().wait()
    right["future"] = near(value, expected(rank, n, "sum")) and value.data_ptr() == later.data_ptr()
    outs = [torch.empty(2, 5, dtype=torch.float64) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.reduce_scatter_tensor(out, given(rank, n))
    manager.wait()
    right["coalesced"] = all(near(out, expected(rank, n, "sum")) for out in outs)
    functional = funcol.reduce_scatter_tensor(given(rank, n), "sum", 0, dist.group.WORLD)
    right["functional"] = near(functional + 0, expected(rank, n, "sum"))
    product = torch.empty(2, 5, dtype=torch.float64)
    dist.reduce_scatter_tensor(product, given(rank, n), op=dist.ReduceOp.PRODUCT)
    right["what gloo alone knows"] = near(product, expected(rank, n, "product"))
    turned = given(rank, n).t().contiguous().t()
    dist.reduce_scatter_tensor(out := torch.empty(2, 5, dtype=torch.float64), turned)
    right["not contiguous"] = near(out, expected(rank, n, "sum"))
    dist.reduce_scatter_tensor(out := torch.empty(5, 2, dtype=torch.float64).t(), given(rank, n).requires_grad_())
    right["output not contiguous, input with gradient"] = near(out, expected(rank, n, "sum")) and not out.requires_grad
    return right


@pytest.mark.parametrize("n", [2, 3])
def test_every_form_of_reduce_scatter_returns_sums_averages_and_extremes(n: int) -> None:
    for right in run_ranks(reduce_scatters, n):
        assert [name for name, good in right.items() if not good] == []


def reduce_scatter_sent(world: World) -> Any:
    out, whole = torch.empty(2, 5, dtype=torch.float64), given(world.place.rank, dist.get_world_size())
    return on_the_wire(lambda group: group._reduce_scatter_base(out, whole, dist.ReduceScatterOptions()).wait())


@pytest.mark.parametrize("n", [2, 3])
def test_a_reduce_scatter_is_one_exchange_and_counts_as_one_reduce_scatter(n: int) -> None:
    nbytes = 2 * n * 5 * 8
    for called, heard, count in run_ranks(reduce_scatter_sent, n):
        # With two ranks, the part that a rank keeps stays where it is.
        assert called == [("alltoall_base", nbytes if n > 2 else nbytes // 2)]
        assert heard == [("reduce_scatter", "world", nbytes)]
        assert count == 1


def peer_gone(world: World, gathers: bool) -> bool:
    if world.place.rank == 1:
        group = dist.group.WORLD
        assert isinstance(group, delegating_group.DelegatingGroup)
        sockets.shut(group.sockets)
        return True
    part, whole = torch.zeros(1 << 18), torch.zeros(2 << 18)
    if gathers:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
    else:
        work = dist.reduce_scatter_tensor(part, whole, async_op=True)
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("gathers", [True, False])
def test_a_broken_exchange_raises(gathers: bool) -> None:
    assert run_ranks(peer_gone, 2, gathers) == [True, True]
