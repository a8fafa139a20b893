"""Test joining, re-forming and leaving the world, the user's own init and destroy, open sockets and leaks."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from jobs import quiet
from ranks import RankFailed, listeners, next_generation, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from nbkit.errors import ClusterError, UsageError
from nbkit.rank.comm import delegating_group
from nbkit.rank.comm.delegating_group import registered
from nbkit.rank.world import failure_alarm, sockets
from nbkit.rank.world import world as world_module
from nbkit.rank.world.rank_place import keep_local
from nbkit.rank.world.world import RankPlace, World, current, open_listener


def destroyed_between(world: World) -> list[float]:
    """Return the losses of a second job like the first, after a program in a cell has destroyed all groups."""
    quiet(strategy="zero3").fit(1)
    dist.destroy_process_group()
    next_generation(world)
    return [record["loss"] for record in quiet(strategy="zero3").fit(2)]


def test_groups_destroyed_by_a_program_are_made_again_for_the_next_job() -> None:
    first, second = run_ranks(destroyed_between, 2, generations=2)
    assert first == second and len(first) == 2


def total(group: Any = None) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item()


def joined(world: World) -> Any:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: os.environ[name] for name in names}
    mine = current() is world and world.alive() and not world.dirty and world.generation == 1
    counted = delegating_group.fingerprint()["world"]
    x = torch.full((2,), float(world.place.rank))
    dist.all_reduce(x)
    # The user's own store on env:// joins the existing one.
    own, rank, size = next(dist.rendezvous("env://"))
    own.set(f"user{rank}", "here")
    own.wait([f"user{other}" for other in range(size)])
    return env, mine, counted, x.tolist(), listeners[0].fileno()


def test_joining_sets_the_environment_and_forms_the_group() -> None:
    for rank, (env, mine, counted, x, fd) in enumerate(run_ranks(joined, 3)):
        assert env.pop("MASTER_PORT").isdigit()
        assert env == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert (mine, counted, x, fd) == (True, 0, [3.0, 3.0], -1)


def test_a_world_of_one_is_joined_like_any_world() -> None:
    ((env, mine, counted, x, _),) = run_ranks(joined, 1)

    assert (env["WORLD_SIZE"], mine, counted, x) == ("1", True, 0, [0.0, 0.0])


def init_again(world: World) -> Any:
    first = dist.group.WORLD
    answers = [dist.init_process_group("gloo"), dist.distributed_c10d.init_process_group()]
    from torch.distributed import init_process_group

    init_process_group(backend="gloo", init_method="env://", world_size=2, rank=world.place.rank)
    return answers, dist.group.WORLD is first, total(), world.alive()


def test_a_second_init_is_harmless() -> None:
    assert run_ranks(init_again, 2) == [([None, None], True, 2.0, True)] * 2


def destroy_and_init(world: World) -> Any:
    told = []
    for _ in range(3):
        pair = dist.new_group([0, 1])
        dist.destroy_process_group(pair)
        told.append(world.dirty)
        dist.destroy_process_group()
        told.append(world.dirty)
        assert not world.alive()
        dist.init_process_group("gloo")
        told.append(world.dirty)
    return told, total(), isinstance(dist.group.WORLD, delegating_group.DelegatingGroup), world.alive()


def test_destroy_marks_the_world_dirty_and_init_joins_again() -> None:
    once = ["", "the default process group was destroyed by user code", ""]
    assert run_ranks(destroy_and_init, 2) == [(once * 3, 2.0, True, True)] * 2


def destroyed_then_reformed(world: World) -> Any:
    dist.destroy_process_group()
    next_generation(world)
    return total(), world.alive(), world.generation, dist.get_backend()


def test_a_reform_makes_the_default_group_that_user_code_destroyed() -> None:
    assert run_ranks(destroyed_then_reformed, 2, generations=2) == [(2.0, True, 2, "gloo")] * 2


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def wrapped(kind: str) -> Any:
    from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(a_model(), bucket_cap_mb=0.001)
    model = a_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")) if kind == "hsdp" else None
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def steps(model: Any, optimizer: Any, rank: int, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class BreaksInBackward(torch.autograd.Function):
    """An identity whose backward breaks rank 0 out and fails there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.rank == 0:
            failure_alarm.break_out("rank 0 failed")
            raise ValueError("a user's error in the middle of backward")
        return grads[0], None


def broken_in_backward(world: World, kind: str) -> Any:
    rank = world.place.rank
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = steps(model, optimizer, rank, range(3))
    inner = model.module if kind == "ddp" else model
    hook = inner[2].register_forward_hook(lambda module, args, output: BreaksInBackward.apply(output, rank))
    # A cluster's parent process does this too: it tells a rank that the closed connections did not wake.
    told = threading.Timer(2.0, failure_alarm.break_out, ("told by rank 0",))
    told.start()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        model(batch(3, rank)).square().mean().backward()
    told.cancel()
    told.join()
    hook.remove()
    failure_alarm.break_out("told by rank 0")
    optimizer.zero_grad()
    next_generation(world)
    return losses + steps(model, optimizer, rank, range(3, 6)), type(raised.value).__name__, world.alive()


def never_broken(world: World, kind: str) -> list[float]:
    model = wrapped(kind)
    return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), world.place.rank, range(6))


@pytest.mark.parametrize(("kind", "n"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.long)])
def test_models_continue_to_train_after_a_break_in_backward(kind: str, n: int) -> None:
    if kind != "ddp" and not hasattr(FSDPModule, "reset_iter_state"):
        with pytest.raises(RankFailed, match="this torch cannot undo it"):
            run_ranks(broken_in_backward, n, kind, generations=2)
        return
    broken = run_ranks(broken_in_backward, n, kind, generations=2)

    assert [answer[0] for answer in broken] == run_ranks(never_broken, n, kind)
    assert [answer[1] for answer in broken] == ["ValueError"] + ["RuntimeError"] * (n - 1)
    assert all(answer[2] for answer in broken)


def reformed_with_sub_groups(world: World) -> Any:
    rank = world.place.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    odd = dist.new_group([1, 3])
    counts = dist.distributed_c10d._world.group_count
    if rank == 3:
        dist.destroy_process_group(odd)
    total()
    next_generation(world)
    reset = {number for key, number in delegating_group.fingerprint().items() if key != "groups made"}
    sums = total(), total(mesh.get_group("dp")), total(mesh.get_group("tp"))
    gone = ""
    if rank == 1:
        with pytest.raises(ClusterError) as raised:
            total(odd)
        gone = str(raised.value)
    later = dist.new_group([0, 2, 3])
    return reset, sums, gone, total(later) if rank != 1 else 0, dist.distributed_c10d._world.group_count - counts


def test_subgroups_survive_a_reform_and_one_that_a_member_lost_names_it() -> None:
    answers = run_ranks(reformed_with_sub_groups, 4, generations=2)

    assert [answer[:2] for answer in answers] == [({0}, (4.0, 2.0, 2.0))] * 4
    assert "some of its members are gone" in answers[1][2] and "ranks without it: [3]" in answers[1][2]
    assert [answer[3:] for answer in answers] == [(3.0, 1), (0, 1), (3.0, 1), (3.0, 1)]


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def many_reforms(world: World) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    measured = []
    for generation in range(20):
        if generation % 2:
            failure_alarm.break_out("again")
        next_generation(world)
        model(torch.ones(2, 4)).sum().backward()
        assert total(mesh.get_group()) == 2
        for listener in listeners[: world.generation]:
            listener.close()
        measured.append(held())
    return measured, world.generation, world.alive()


def test_twenty_reforms_leak_nothing() -> None:
    for measured, generation, alive in run_ranks(many_reforms, 2, generations=21):
        # The test's own listening sockets close one by one; a connection that is closing may still be counted.
        fds = [fd + step for step, (fd, _) in enumerate(measured)]
        threads = [threads for _, threads in measured]
        assert max(fds[10:]) - max(fds[:10]) < 5, fds
        assert max(threads[10:]) - max(threads[:10]) < 5, threads
        assert (generation, alive) == (21, True)


def all_listening(world: World) -> list[str]:
    init_device_mesh("cpu", (2,))
    dist.new_group(backend="gloo")
    next_generation(world)
    mine, addresses = sockets.inodes(), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[9]) in mine:
                address = fields[1].split(":")[0]
                words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
                addresses.append(str(ipaddress.ip_address(b"".join(words))))
    return addresses


def test_all_sockets_listen_on_loopback_only() -> None:
    for addresses in run_ranks(all_listening, 2, generations=2):
        assert addresses
        for address in map(ipaddress.ip_address, addresses):
            assert getattr(address, "ipv4_mapped", None) or address
            assert (getattr(address, "ipv4_mapped", None) or address).is_loopback


def left_alone(rank: int) -> str:
    if rank:
        return ""
    address, port = listeners[0].getsockname()
    with pytest.raises(ClusterError) as raised:
        World.join(RankPlace(0, 2, 0, 2, "cpu", "gloo"), listen=listeners[0], address=address, port=port, timeout_s=1)
    assert current() is None
    return str(raised.value)


def test_joining_fails_after_the_timeout_if_a_rank_never_comes() -> None:
    assert "could not be formed" in run_ranks(left_alone, 2, join=False)[0]


def leaves_and_joins(world: World) -> Any:
    world.leave()
    world.leave()
    gone = current() is None, dist.is_initialized(), world.alive()
    address, port = listeners[1].getsockname()
    again = World.join(world.place, listen=listeners[1], address=address, port=port, generation=2)
    return gone, total(), again.alive(), again.generation


def test_a_rank_can_leave_and_join_a_new_world() -> None:
    assert run_ranks(leaves_and_joins, 2, generations=2) == [((True, False, False), 2.0, True, 2)] * 2


def replaced(rank: int) -> Any:
    """Let rank 1 leave and join again with no groups, like a new process. Rank 0 keeps its groups."""
    address, port = listeners[0].getsockname()
    place = RankPlace(rank, 2, rank, 2, "cpu", "gloo")
    world = World.join(place, listen=listeners[0], address=address, port=port)
    pair = dist.new_group([0, 1])
    total(pair)  # now rank 0 has its end of the connections too
    if rank == 1:
        failure_alarm.break_out("this rank ends")
        world.leave()
        address, port = listeners[1].getsockname()
        World.join(place, listen=listeners[1], address=address, port=port, generation=2)
        return total(), total(dist.new_group([0, 1])), True
    with pytest.raises(RuntimeError):
        total()
    next_generation(world)
    lost = isinstance(pair.inner, delegating_group.Broken)
    return total(), total(dist.new_group([0, 1])), lost


def test_a_replaced_rank_joins_the_next_generation() -> None:
    assert run_ranks(replaced, 2, join=False, generations=2) == [(2.0, 2.0, True)] * 2


SCRIPT = """
import os, torch, torch.distributed as dist
from nbkit.rank.world.world import World, current
world = World.join_from_env()
assert World.join_from_env() is world is current() and world.alive()
dist.init_process_group("gloo")
dist.destroy_process_group()
dist.init_process_group("gloo")
x = torch.ones(1); dist.all_reduce(x)
place = world.place
line = f"sum {int(x)} rank {place.rank} of {place.world_size} {type(dist.group.WORLD).__name__}\\n"
os.write(1, line.encode())  # in one piece: both ranks share the pipe
world.leave()
"""


@pytest.mark.long  # as below, where ranks are forked; exported scripts join under torchrun
@pytest.mark.parametrize("n", [0, 2])
def test_a_script_joins_from_the_environment(tmp_path: Path, n: int) -> None:
    """Run with n=0: plain python, no RANK; n=2: torchrun, where a second init with the same keys would hang."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"] if n else []
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}

    done = subprocess.run([sys.executable, *run, str(script)], env=env, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    size = n or 1
    expected = [f"sum {size} rank {rank} of {size} DelegatingGroup" for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == expected


def joins_from_the_environment(rank: int, size: int, port: int) -> Any:
    """Join as under torchrun, whose agent holds the store. size 0: as in plain python."""
    if size:
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = World.join_from_env()
    assert World.join_from_env() is world is current() and world.alive()
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    place = world.place
    return total(), place.rank, place.world_size, type(dist.group.WORLD).__name__


def test_a_rank_joins_from_the_environment_with_the_agents_store_or_alone() -> None:
    """Join with that store: a second init with the same keys would hang."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    together = run_ranks(joins_from_the_environment, 2, 2, agent.port, join=False)
    assert together == [(2.0, rank, 2, "DelegatingGroup") for rank in range(2)]
    assert run_ranks(joins_from_the_environment, 1, 0, 0, join=False) == [(1.0, 0, 1, "DelegatingGroup")]


@pytest.mark.parametrize(
    "values", [(2, 2, 0, 1, "cpu", "gloo"), (0, 1, 0, 1, "tpu", "gloo"), (0, 1, 0, 1, "cpu", "nccl")]
)
def test_an_impossible_place_is_refused(values: Any) -> None:
    with pytest.raises(UsageError):
        RankPlace(*values)


def test_cpu_tensors_go_over_gloo_if_gpus_use_nccl() -> None:
    assert RankPlace(0, 1, 0, 1, "cuda", "nccl").torch_backend == "cpu:gloo,cuda:nccl"
    assert RankPlace(0, 1, 0, 1, "cuda", "gloo").torch_backend == "gloo"


@pytest.mark.parametrize(
    ("address", "kept"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.7", False)]
)
def test_gloo_and_nccl_use_loopback_on_one_host(monkeypatch: pytest.MonkeyPatch, address: str, kept: bool) -> None:
    """Check the variables. Without them, both use the interface of the host name."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is restored at the end
        monkeypatch.delenv(name)
    keep_local(address)
    loopback = ("lo0" if sys.platform == "darwin" else "lo") if kept else None
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    keep_local(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def interrupted(world: World) -> Any:
    """Interrupt a rank that forms a group whose other members do not come."""
    if world.place.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.new_group([0, 1])
    next_generation(world)
    return total(), total(dist.new_group([0, 1]))


def test_forming_a_group_can_be_interrupted() -> None:
    assert run_ranks(interrupted, 2, generations=2) == [(2.0, 2.0)] * 2


def compiled(world: World) -> Any:
    model = nn.parallel.DistributedDataParallel(a_model())
    fast = torch.compile(model, backend="aot_eager")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def summed(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", "0") + 1

    loss = fast(batch(0, world.place.rank)).square().mean()
    loss.backward()
    return next(model.parameters()).grad.sum().item(), summed(torch.ones(2)).tolist()


@pytest.mark.long
def test_compiled_models_and_functions_work_with_the_groups() -> None:
    first, second = run_ranks(compiled, 2)
    assert first == second and first[1] == [5.0, 5.0]


def test_open_listener_is_on_loopback() -> None:
    with open_listener() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def each_waits_for_the_other(world: World) -> float:
    """Return a sum after a broadcast whose sockets were forgotten, so both worker threads still wait."""
    here = torch.ones(4)
    dist.broadcast(here, src=1 - world.place.rank, async_op=True)
    for group in registered():
        group.sockets = frozenset()
    next_generation(world)
    dist.all_reduce(here)
    return here[0].item()


def test_a_group_whose_worker_waits_for_ever_does_not_block_a_reform() -> None:
    assert run_ranks(each_waits_for_the_other, 2, generations=2, timeout=40) == [2.0, 2.0]


class Counted(dist.HashStore):
    """A store that counts its requests."""

    requests = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "add", "multi_get", "check", "wait"):
            Counted.requests += 1
        return super().__getattribute__(name)


def test_a_thousand_ranks_compare_groups_with_a_few_requests_each() -> None:
    ranks, store = 1024, Counted()
    pairs = {rank: json.dumps(["pair", [rank - rank % 2, rank - rank % 2 + 1]]) for rank in range(ranks)}
    for rank in reversed(range(ranks)):
        groups = [] if rank == 7 else [pairs[rank]]
        world_module._tell(store, rank, ranks, {"groups": groups, "default": "3" if rank else "", "count": rank})
    heard = [world_module._hear(store) for _ in range(ranks)]
    assert heard[0] == heard[-1] == world_module._Common({pairs[6]: [7]}, "3", ranks - 1)
    assert Counted.requests <= 4 * ranks
