"""Test that a delegating group returns what the raw group returns, counts operations, and keeps torch's answers."""

from __future__ import annotations

import _thread
import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import listeners, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from nbkit.errors import ClusterError
from nbkit.rank.comm import delegating_group
from nbkit.rank.world.world import World
from nbkit.records.run_advice import differences

N = 4


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: Any, rank: int, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3) * (rank + 1) + 0.1


def ddp(rank: int) -> Any:
    model = nn.parallel.DistributedDataParallel(net(rank))
    return train(model, rank), [p.detach() for p in model.parameters()]


def fsdp(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return train(model, rank), [p.full_tensor().detach() for p in model.parameters()]


def hybrid_fsdp_on_a_mesh(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    model = fully_shard(net(), mesh=mesh)
    return train(model, rank), mesh.get_group("dp").size(), mesh.get_local_rank("shard")


def tensor_parallel(rank: int) -> Any:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (N,))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(model, 0)
    whole = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    assert isinstance(whole, DTensor)
    return losses, whole.full_tensor(), whole.redistribute(mesh, [Shard(1)]).to_local()


def pipeline(rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = list(net())
    part = nn.Sequential(*(layers[:2], layers[2:3], layers[3:4], layers[4:])[rank])
    stage = PipelineStage(part, rank, N, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    if rank == 0:
        schedule.step(torch.cat([batch(i) for i in range(4)]))
    else:
        schedule.step(target=torch.zeros(16, 8), losses=losses) if rank == N - 1 else schedule.step()
    return losses, [p.grad for p in part.parameters()]


def send_and_receive(rank: int) -> Any:
    right, left = (rank + 1) % N, (rank - 1) % N
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    if rank % 2:
        dist.recv(one, left)
        dist.send(values(rank), right)
    else:
        dist.send(values(rank), right)
        dist.recv(one, left)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values(rank) * 2, left), dist.P2POp(dist.irecv, other, right)]
    )
    for work in works:
        work.wait()
    return one, other


def receive_from_anyone(rank: int) -> Any:
    if rank:
        dist.send(values(0), 0)
        return None
    got = torch.zeros(2, 3)
    return sorted(dist.recv(got) for _ in range(N - 1)), got


def objects(rank: int) -> Any:
    gathered: list[Any] = [None] * N
    dist.all_gather_object(gathered, {"rank": rank})
    on_one: list[Any] | None = [None] * N if rank == 1 else None
    dist.gather_object(f"from {rank}", on_one, dst=1)
    cast = [rank, "x"]
    dist.broadcast_object_list(cast, src=2)
    piece: list[Any] = [None]
    dist.scatter_object_list(piece, [{"for": r} for r in range(N)] if rank == 0 else None, src=0)
    return gathered, on_one, cast, piece


def basic_collectives(rank: int) -> Any:
    x = [values(rank) for _ in range(9)]
    dist.all_reduce(x[0], op=dist.ReduceOp.MAX)
    dist.broadcast(x[1], 3)
    dist.reduce(x[2], 2)
    parts = [torch.zeros(2, 3) for _ in range(N)]
    dist.all_gather(parts, x[3])
    joined = torch.zeros(2 * N, 3)
    dist.all_gather_into_tensor(joined, x[4])
    piece = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(piece, torch.cat([x[5]] * N))
    other = torch.zeros(2, 3)
    dist.reduce_scatter(other, [values(rank + i) for i in range(N)])
    swapped = torch.zeros(8, 3)
    dist.all_to_all_single(swapped, torch.cat([x[6]] * N))
    gathered = [torch.zeros(2, 3) for _ in range(N)] if rank == 0 else None
    dist.gather(x[7], gathered, dst=0)
    dealt = torch.zeros(2, 3)
    dist.scatter(dealt, [values(i) for i in range(N)] if rank == 1 else None, src=1)
    dist.barrier()
    return x[0], x[1], x[2] if rank == 2 else None, parts, joined, piece, other, swapped, gathered, dealt


def coalesced(rank: int) -> Any:
    one, two = values(rank), values(rank) * 3
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two)
    outs = [torch.zeros(2 * N, 3), torch.zeros(2 * N, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outs[0], one)
        dist.all_gather_into_tensor(outs[1], two)
    manager.wait()
    return one, two, outs


def asynchronous(rank: int) -> Any:
    x, parts = values(rank), [torch.zeros(2, 3) for _ in range(N)]
    works = [dist.all_reduce(x, async_op=True), dist.all_gather(parts, values(rank) + 1, async_op=True)]
    for work in works:
        work.wait()
    future = dist.all_reduce(y := values(rank), async_op=True).get_future()
    return x, parts, future.then(lambda done: done.value()[0] * 2).wait(), y


def functional(rank: int) -> Any:
    x = values(rank).requires_grad_()
    whole = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (whole * torch.arange(whole.numel()).reshape(whole.shape)).sum().backward()
    summed = funcol.all_reduce(values(rank), "sum", dist.group.WORLD)
    pieces = funcol.reduce_scatter_tensor(torch.cat([values(rank)] * N), "sum", 0, dist.group.WORLD)
    swapped = funcol.all_to_all_single(torch.cat([values(rank)] * N), None, None, dist.group.WORLD)
    several = funcol.all_reduce_coalesced([values(rank), values(rank) + 1], "sum", dist.group.WORLD)
    return whole.detach() + 0, x.grad, summed + 0, pieces + 0, swapped + 0, [one + 0 for one in several]


def sub_groups(rank: int) -> Any:
    named = dist.new_group(backend="gloo")
    pair, _ = dist.new_subgroups(2)
    # Every rank makes one before `odd`: torch names groups by the number that a rank has made or, in some versions,
    # belongs to.
    local = dist.new_group([0, 3] if rank in (0, 3) else [1, 2], use_local_synchronization=True)
    odd = dist.new_group([1, 3])
    x = [values(rank) for _ in range(4)]
    dist.all_reduce(x[0], group=named)
    dist.all_reduce(x[1], group=pair)
    if rank % 2:
        dist.all_reduce(x[2], group=odd)
    dist.all_reduce(x[3], group=local)
    dist.broadcast(x[3], 3 if rank in (0, 3) else 2, group=local)
    backends = [dist.get_backend(), dist.get_backend(named), dist.get_backend(pair)]
    answers = dist.get_process_group_ranks(pair), dist.get_rank(pair), dist.get_world_size(pair), pair.name()
    dist.destroy_process_group(pair)
    return x, backends, answers


def torchs_own_answers(rank: int) -> Any:
    dist.monitored_barrier()
    group = dist.group.WORLD
    assert group is not None
    kind = type(group._get_backend(torch.device("cpu"))).__name__
    types = sorted(str(device) for device in group._device_types)
    config = dist.distributed_c10d.get_backend_config(group)
    resolved = dist.distributed_c10d._resolve_process_group(group.group_name) is group
    return dist.get_backend(), kind, types, config, group.group_name, group.group_desc, resolved, group.rank()


WORKLOADS: list[Callable[[int], Any]] = [
    ddp, fsdp, hybrid_fsdp_on_a_mesh, tensor_parallel, pipeline, send_and_receive, receive_from_anyone, objects,
    basic_collectives, coalesced, asynchronous, functional, sub_groups, torchs_own_answers,
]  # fmt: skip


def all_workloads(who: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 deprecates and 2.11 needs
    if isinstance(who, World):
        rank = who.place.rank
    else:
        rank, os.environ["GLOO_SOCKET_IFNAME"] = who, "lo"
        port = listeners[0].getsockname()[1]
        fd = listeners[0].detach() if rank == 0 else None
        store = dist.TCPStore("127.0.0.1", port, N, rank == 0, wait_for_workers=False, master_listen_fd=fd)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=N)
    return {
        work.__name__: (work(rank), isinstance(dist.group.WORLD, delegating_group.DelegatingGroup))
        for work in WORKLOADS
    }


@pytest.fixture(scope="module")
def raw_and_ours() -> tuple[list[Any], list[Any]]:
    return run_ranks(all_workloads, N, join=False), run_ranks(all_workloads, N)


# Our reduce-scatter adds in the order of the ranks, gloo's in another order.
REDUCE_SCATTER = {"fsdp", "hybrid_fsdp_on_a_mesh", "basic_collectives", "functional"}


def assert_same(ours: Any, raw: Any, rtol: float) -> None:
    if isinstance(raw, torch.Tensor):
        torch.testing.assert_close(ours, raw, rtol=rtol, atol=rtol)
    elif isinstance(raw, (list, tuple)):
        assert type(ours) is type(raw) and len(ours) == len(raw)
        for one, other in zip(ours, raw, strict=True):
            assert_same(one, other, rtol)
    else:
        assert ours == (pytest.approx(raw, rel=rtol) if isinstance(raw, float) else raw)


@pytest.mark.parametrize("name", [work.__name__ for work in WORKLOADS])
def test_results_equal_those_of_raw_gloo(raw_and_ours: tuple[list[Any], list[Any]], name: str) -> None:
    for raw, ours in zip(*raw_and_ours, strict=True):
        assert_same(ours[name][0], raw[name][0], 1e-6 if name in REDUCE_SCATTER else 0.0)
        assert (raw[name][1], ours[name][1]) == (False, True)


def counted(world: World) -> Any:
    rank, heard = world.place.rank, []
    before = delegating_group.where()
    pair, _ = dist.new_subgroups(2)
    delegating_group.listeners.append(lambda *told: heard.append(told))
    dist.all_reduce(torch.ones(8))
    parts = [torch.zeros(4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(parts, torch.ones(4, dtype=torch.float64), group=pair)
    dist.broadcast(torch.ones(2), src=rank - rank % 2, group=pair)
    if rank == 0:
        dist.send(torch.ones(3), 1)
    if rank == 1:
        dist.recv(torch.ones(3), 0)
    delegating_group.listeners.clear()
    dist.barrier()
    return delegating_group.fingerprint(), heard, before, delegating_group.where()


def test_operations_are_counted_reported_and_shown() -> None:
    answers = run_ranks(counted, 2)

    pair = "1 [0,1]"
    counts = {"groups made": 2, "world": 2, pair: 2}
    transfer = "world: 0->1"
    assert [answer[0] for answer in answers] == [
        {**counts, f"{transfer} sent": 1},
        {**counts, f"{transfer} received": 1},
    ]
    collectives = [("all_reduce", "world", 32), ("all_gather", pair, 32), ("broadcast", pair, 8)]
    assert answers[0][1] == [*collectives, ("send", "world", 12)]
    assert answers[1][1] == [*collectives, ("recv", "world", 12)]
    assert differences([answer[0] for answer in answers]) == []
    for _, _, before, after in answers:
        assert before == ""
        assert after.startswith("barrier #2 of group world, issued ") and after.endswith(" s ago")


def test_ranks_that_are_behind_and_unmatched_sends_are_reported() -> None:
    ahead = {"world": 7, "dp 1 [0,1]": 3, "world: 0->1 sent": 2, "world: 1->0 received": 1}
    behind = {"world": 5, "dp 1 [0,1]": 3, "world: 0->1 received": 1, "world: 1->0 sent": 1}

    assert differences([ahead, behind]) == [
        "world: rank 0 issued 7, rank 1 issued 5",
        "world: 0->1: sent 2, received 1",
    ]
    assert differences([]) == differences([ahead])[:0] == []


def test_a_receive_from_anyone_matches_any_send() -> None:
    receiver = {"world: any->0 received": 1, "world: 1->0 received": 1}
    senders = [{"world: 1->0 sent": 1}, {"world: 2->0 sent": 1}]

    assert differences([receiver, *senders]) == []
    assert differences([receiver, senders[0]]) == ["world: *->0: sent 1, received 2"]


def other_kinds(world: World) -> Any:
    default = dist.group.WORLD
    assert default is not None
    timeouts = [default._get_backend(torch.device("cpu")).options._timeout]
    named = dist.new_group(backend="gloo")
    assert isinstance(named, delegating_group.DelegatingGroup)
    timeouts.append(named._get_backend(torch.device("cpu")).options._timeout)
    asked = dist.new_group(timeout=timedelta(seconds=7))
    assert isinstance(asked, delegating_group.DelegatingGroup)
    timeouts.append(asked._get_backend(torch.device("cpu")).options._timeout)
    fake = dist.new_group(backend="fake")
    return timeouts, isinstance(fake, delegating_group.DelegatingGroup), dist.get_backend(fake)


def test_only_gloo_and_nccl_are_delegated_and_only_explicit_timeouts_apply() -> None:
    for timeouts, fake_is_delegated, name in run_ranks(other_kinds, 2):
        assert timeouts == [delegating_group.FOREVER, delegating_group.FOREVER, timedelta(seconds=7)]
        assert (fake_is_delegated, name) == (False, "fake")


def missed_barrier(world: World) -> str:
    if world.place.rank:
        return ""
    with pytest.raises(RuntimeError) as raised:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    return str(raised.value)


def test_monitored_barrier_names_the_missing_rank() -> None:
    assert "Ranks 1 failed to pass monitoredBarrier" in run_ranks(missed_barrier, 2)[0]


def test_every_communication_method_of_this_torch_is_delegated() -> None:
    inherited = {name for name in vars(dist.ProcessGroup) if name not in vars(delegating_group.DelegatingGroup)}
    backends = set(dist.ProcessGroup.BackendType.__members__)

    assert {name for name in inherited - delegating_group.OWN - backends if not name.startswith("__")} == set()


def test_a_broken_group_reports_why_and_what_to_type() -> None:
    broken = delegating_group.Broken("Group dp is broken.", numbers="members [0, 1]", hint="new_group(...)")

    with pytest.raises(ClusterError, match=r"Group dp is broken\.\nmembers \[0, 1\]\n→ new_group"):
        broken.allreduce([torch.ones(1)])


class Inner:
    """A group that notes the thread that destroys it."""

    def __init__(self, ended: list[str]) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(threading.current_thread().name)


def dropped(world: World) -> Any:
    """Return (whether dropping a group in use had to wait, threads that destroyed it by then, all such threads)."""
    ended: list[str] = []
    group: Any = dist.new_group([0])
    real, group.inner = group.inner, Inner(ended)
    held = group.inner
    over = group.drop(delegating_group.Broken("dropped"))
    waited = not over.wait(5.0)
    before = list(ended)
    del held
    deadline = time.monotonic() + 20.0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    group.inner = Inner(ended)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        group.drop(delegating_group.Broken("dropped"))
    group.inner = real
    return waited, before, ended


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_an_unused_group_is_destroyed_on_its_own_thread() -> None:
    # NCCL's destructor has taken a minute. While the interpreter ends, no thread can start.
    assert run_ranks(dropped, 1) == [(False, [], ["nbkit-release", "MainThread"])]


def issued_below_nothing(world: World) -> float:
    """Issue an operation on a thread without Python frames, like autograd's when DDP reduces on a GPU."""
    total = torch.ones(1)
    _thread.start_new_thread(dist.group.WORLD.allreduce, ([total],))
    deadline = time.monotonic() + 20.0
    while total.item() != world.place.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    return total.item()


def test_a_thread_without_python_frames_can_issue_operations() -> None:
    assert run_ranks(issued_below_nothing, 2) == [2.0, 2.0]
