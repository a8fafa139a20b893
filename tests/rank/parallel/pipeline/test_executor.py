"""Test that every schedule gives the gradients of one process, whatever tensors its stages send."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pretend import Communicator, join
from ranks import next_generation, run_ranks
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.pipeline.executor import Pipeline
from nbkit.rank.parallel.pipeline.p2p import Routes, StageMessage
from nbkit.rank.world import sockets
from nbkit.schedules import BUILT_IN, Op, Schedule, simulate
from nbkit.schedules.simulate import token_rounds

WIDTH = 6


class Block(nn.Module):
    """A block from (hidden, residual, mask) to the same. Two need gradients; the mask is only passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: Tensor, residual: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.tanh_()  # in place, at the start of a stage
        inner = torch.where(mask, self.up(self.norm(hidden)).relu(), 0.1)
        return hidden + self.down(inner) * self.scale, residual * 0.5 + hidden @ self.up.weight.t()[:, :WIDTH], mask


class Model(nn.Module):
    """A model of an embedding, blocks and a head, with one block per stage."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 11)

    def stage(self, index: int, received: tuple[Tensor, ...], tokens: Tensor, weight: float) -> tuple[Tensor, ...]:
        if index == 0:
            hidden = self.embed(tokens)
            received = (hidden, hidden * 0 + 1.0, (tokens % 2 == 0).unsqueeze(-1))
        received = self.blocks[index](*received)
        if index + 1 < len(self.blocks):
            return received
        hidden, residual, _ = received
        logits = self.head(hidden + residual)
        return (nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum") * weight,)


def batch(num_micro: int, ragged: bool) -> list[Tensor]:
    made = torch.Generator().manual_seed(5)
    rows = [2] * num_micro
    if ragged:
        rows[-1] = 1
    return [torch.randint(0, 11, (n, 3), generator=made) for n in rows]


def one_process(model: Model, micros: list[Tensor]) -> tuple[list[float], dict[str, Tensor | None]]:
    losses = []
    for tokens in micros:
        received: tuple[Tensor, ...] = ()
        for index in range(len(model.blocks)):
            received = model.stage(index, received, tokens, 0.25)
        received[0].backward()
        losses.append(float(received[0].detach()))
    return losses, taken(model)


def taken(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def difference(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> float:
    """Return ||ours - theirs|| / ||theirs||, or infinity if only one has some gradient."""
    assert ours.keys() <= theirs.keys() and ours
    if any((ours[name] is None) != (theirs[name] is None) for name in ours):
        return float("inf")
    pairs = [(ours[name], theirs[name]) for name in ours if ours[name] is not None]
    off = torch.cat([(a - b).flatten() for a, b in pairs]).norm()
    return float(off / torch.cat([b.flatten() for _, b in pairs]).norm())


def made(num_blocks: int) -> Model:
    torch.manual_seed(0)
    return Model(num_blocks).double()


def held(model: Model, stages: tuple[int, ...]) -> set[str]:
    prefixes = [f"blocks.{s}." for s in stages]
    prefixes += ["embed."] * (0 in stages) + ["head."] * (len(model.blocks) - 1 in stages)
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))}


def stepped(
    model: Model, pipeline: Pipeline, micros: list[Tensor], **options: Any
) -> tuple[list[float], dict[str, Tensor | None]]:
    """Return the losses on this rank, and the gradients of its parameters."""

    def forward(stage: int, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return model.stage(stage, received, micros[micro], 0.25)

    results = pipeline.run(len(micros), forward, lambda micro: tuple(micros[micro].shape), **options)
    mine = held(model, pipeline.schedule.stages_of(pipeline.rank))
    grads = taken(model)
    assert all(grads[name] is None for name in grads.keys() - mine)
    return [float(loss) for (loss,) in results], {name: grads[name] for name in mine}


def every_schedule(world: Any, ranks: int) -> list[tuple[str, int, float, float]]:
    """Return (schedule, micro-batches, difference of gradients, difference of losses) for steps of several shapes."""
    rows = []
    group = torch.distributed.group.WORLD if ranks > 1 else None
    for name in BUILT_IN:
        schedule = Schedule.of(name, ranks, 4)
        model = made(schedule.num_stages)
        pipeline = Pipeline(schedule, group, world.place.rank, torch.device("cpu"))
        shapes = ((4, False), (4, True), (1, False), (2 * ranks + 1, False))
        for num_micro, ragged in shapes if ranks < 4 else shapes[1:3]:
            micros = batch(num_micro, ragged)
            wanted = one_process(model, micros)
            losses, grads = stepped(model, pipeline, micros)
            off = max((abs(a - b) for a, b in zip(losses, wanted[0], strict=False)), default=0.0)
            assert len(losses) == (num_micro if schedule.rank_of(schedule.num_stages - 1) == world.place.rank else 0)
            rows.append((name, num_micro, difference(grads, wanted[1]), off))
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_of_every_schedule_equal_those_of_one_process(ranks: int) -> None:
    for rows in run_ranks(every_schedule, ranks, ranks):
        for name, num_micro, grads, losses in rows:
            assert grads <= 1e-12 and losses <= 1e-12, (name, num_micro, grads, losses)


class Token:
    """An object that is alive as long as the graph of one stage and micro-batch."""


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: weakref.WeakSet[Token]) -> Tensor:
        ctx.token = Token()
        alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def order_and_memory(world: Any) -> None:
    for name in BUILT_IN:
        observed(name, world.place.rank)


def observed(name: str, rank: int) -> None:
    schedule = Schedule.of(name, 2, 6)
    model, micros = made(schedule.num_stages), batch(6, False)
    pipeline = Pipeline(schedule, torch.distributed.group.WORLD, rank, torch.device("cpu"))
    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    started, done = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    lives, under_way = [], []

    def on_op(*op: Any) -> Callable[[], None]:
        started.append(op)

        def over() -> None:
            assert started[len(done) :] == [op]  # operations do not overlap
            done.append(op)
            lives.append(len(alive))
            under_way.append(sum(map(len, pipeline._channels._outbox.values())))

        return over

    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (Holding.apply(args[0], alive), *args[1:]))
    stepped(model, pipeline, micros, on_op=on_op)
    assert done == [tuple(op) for op in schedule.ops[rank]]
    assert max(lives) == simulate(schedule).peak[rank] and lives[-1] == 0, (name, lives)
    # A send is released when its neighbour answers. Only GPipe sends everything before the first answer.
    assert max(under_way) <= (6 if name == "gpipe" else 5), (name, under_way)
    assert not pipeline._channels._posted and not any(pipeline._channels._outbox.values())


def forward_only(world: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Return the results of an evaluation between two training steps, and the expected results."""
    rank, model = world.place.rank, made(4)
    micros = batch(3, True)
    pipeline = Pipeline(Schedule.of("zbv", 2, 4), torch.distributed.group.WORLD, rank, torch.device("cpu"))
    wanted = one_process(model, micros)
    stepped(model, pipeline, micros)

    def forward(stage: int, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert not torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in received)
        out = model.stage(stage, received, micros[micro], 0.25)
        return (*out, torch.tensor(micro)) if stage == 3 else out

    results = pipeline.run(3, forward, lambda micro: tuple(micros[micro].shape), training=False)
    assert difference(stepped(model, pipeline, micros)[1], wanted[1]) <= 1e-12
    return [[float(one) for one in micro] for micro in results], [[x, i] for i, x in enumerate(wanted[0])]


def test_operations_run_in_the_order_of_the_schedule_and_free_their_memory() -> None:
    run_ranks(order_and_memory, 2)


def test_forward_only_returns_results_on_the_rank_of_the_last_stage() -> None:
    (results, wanted), (nothing, _) = run_ranks(forward_only, 2)
    assert results == [pytest.approx(row, abs=1e-12) for row in wanted] and nothing == []


def odd_tensors(world: Any) -> None:
    """Send unusual tensors between stages: many dims, many tensors, empty, no dims, several dtypes, unused, a leaf."""
    rank, device = world.place.rank, torch.device("cpu")
    pipeline = Pipeline(Schedule.of("1f1b", 2, 2), torch.distributed.group.WORLD, rank, device)
    weight = nn.Parameter(torch.full((3,), 2.0))
    got = []

    def forward(stage: int, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if stage == 0:
            several = [(weight * i).to(torch.bfloat16) for i in range(12)]
            plain = torch.arange(6).view(1, 1, 2, 3, 1).transpose(2, 3), torch.tensor(True), torch.empty(0, 4)
            return (weight, weight.sum() * micro, *plain, *several)
        got.append(received)
        return (received[0].sum() + received[1] + received[7].float().sum(),)

    pipeline.run(2, forward, lambda micro: "same")
    if rank == 1:
        first, total, numbers, truth, empty, *several = got[1]
        assert first.tolist() == [2.0] * 3 and total.shape == () and total.item() == 6.0
        assert numbers.shape == (1, 1, 3, 2, 1) and numbers.flatten().tolist() == [0, 3, 1, 4, 2, 5]
        assert truth.item() is True and empty.shape == (0, 4) and len(several) == 12
        assert several[3].dtype == torch.bfloat16 and several[3].requires_grad and not numbers.requires_grad
    else:
        assert weight.grad is not None and weight.grad.tolist() == [2 * (1.0 + 2.0) + 1.0] * 3
    with pytest.raises(
        TrainingError, match="returned tensors of another shape or dtype" if rank == 0 else "on purpose"
    ):
        grown(pipeline, rank)


def grown(pipeline: Pipeline, rank: int) -> None:
    """Return a different shape under the same key from stage 0."""
    if rank == 1:
        raise TrainingError("on purpose")
    pipeline.run(1, lambda *_: (torch.ones(5),), lambda micro: "same")


def test_any_tensors_pass_between_stages_and_an_unannounced_shape_is_refused() -> None:
    run_ranks(odd_tensors, 2)


def broken_off(world: Any) -> float:
    """Fail on rank 1 in the middle of a step, form the world again, and return the difference of the next step."""
    rank, model = world.place.rank, made(4)
    pipeline = Pipeline(Schedule.of("zbv", 2, 4), torch.distributed.group.WORLD, rank, torch.device("cpu"))
    micros = batch(4, False)

    def failing(stage: int, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if stage == 2 and micro == 1:
            for group in delegating_group.live():  # as the watchdog does, so that the other rank stops waiting
                sockets.shut(group.sockets)
            raise ValueError("on purpose")
        return model.stage(stage, received, micros[micro], 0.25)

    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="on purpose" if rank == 1 else ""):
        pipeline.run(4, failing, lambda micro: tuple(micros[micro].shape))
    model.zero_grad(set_to_none=True)
    next_generation(world)
    pipeline.begin_again()
    wanted = one_process(model, micros)
    return difference(stepped(model, pipeline, micros)[1], wanted[1])


def test_an_error_in_one_stage_is_raised_and_the_next_run_is_right() -> None:
    assert max(run_ranks(broken_off, 2, generations=2)) <= 1e-12


def rendezvous(schedule: Schedule, lists: Sequence[Sequence[Op]], sequences: int | None = None) -> list[Op]:
    """Return the operations that never run if each rank has one communicator and issues its messages in order.

    A message passes when it is the next message at both ends, and the operation that makes it has run. A receive may
    be issued early, but never before an earlier send of the same rank.
    """
    of = schedule.rank_of
    routes = [Routes.of(lists, rank, of, schedule.num_stages, sequences) for rank in range(len(lists))]
    queues, left, ran = [deque(one.order) for one in routes], [deque(enumerate(ops)) for ops in lists], set[Op]()
    here: list[set[StageMessage]] = [set() for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(left):
            while ops:
                index, op = ops[0]
                need, token = routes[rank].needs[index], op.micro - sequences if sequences is not None else -1
                made = token < 0 or Op("F", schedule.num_stages - 1, token) in ran
                if (need is not None and need not in here[rank]) or not made:
                    break
                ran.add(op)
                ops.popleft()
                moved = True
        for rank, queue in enumerate(queues):
            while queue and (there := routes[rank].target.get(queue[0])) is not None:
                made = any(
                    give == queue[0] and op in ran for op, give in zip(lists[rank], routes[rank].gives, strict=True)
                )
                if not made or queues[there.rank][0] != queue[0]:
                    break
                here[there.rank].add(queue.popleft())
                queues[there.rank].popleft()
                moved = True
    return [op for ops in left for _, op in ops]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_schedule_deadlocks_with_messages_in_one_order(ranks: int) -> None:
    for name in BUILT_IN:
        for num_micro in (ranks, 2 * ranks + 1):
            schedule = Schedule.of(name, ranks, num_micro)
            assert rendezvous(schedule, schedule.ops) == []
            assert rendezvous(schedule, [tuple(op for op in ops if op.kind == "F") for ops in schedule.ops]) == []
        for sequences in (1, ranks - 1, ranks + 1):
            assert rendezvous(schedule, token_rounds(schedule, sequences, 3), sequences) == []


def in_one_order(rank: int) -> tuple[list[float], int]:
    """Return (gradient differences of schedules under NCCL's rules, number of communicators besides the world's)."""
    join(rank, 4)
    off = []
    group = torch.distributed.group.WORLD
    ordered = torch.distributed.new_group([0, 1, 2, 3])
    for name in ("1f1b", "interleaved", "zbv"):
        schedule = Schedule.of(name, 4, 4)
        model, micros = made(schedule.num_stages), batch(4, True)
        pipeline = Pipeline(schedule, group, rank, torch.device("cpu"), ordered=ordered)
        wanted = one_process(model, micros)
        for _ in range(2):  # in the second run the shapes are known, and sends and receives are batched
            off.append(difference(stepped(model, pipeline, micros)[1], wanted[1]))
    return off, len(Communicator.everyone) - 1


def test_a_pipeline_under_nccl_needs_one_communicator() -> None:
    for off, communicators in run_ranks(in_one_order, 4, join=False, timeout=120):
        assert max(off) <= 1e-12 and communicators == 1
