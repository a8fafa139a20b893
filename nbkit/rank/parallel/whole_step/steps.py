"""One step of a model by one process, as torch makes it, and by ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import Alone, ThreadMeeting, ThreadRanks
from nbkit.rank.data.batch import call, pair, shapes_of, shard_of
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.grad_norm import clip
from nbkit.rank.parallel.micro_batch import ForwardPass, micro_batches, most_passes, whole_of
from nbkit.rank.parallel.module.batch_norm import check_buffers, watched
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.options import Options, parts_rows
from nbkit.rank.parallel.parallelize import cut
from nbkit.rank.parallel.process_groups import connect_threads
from nbkit.rank.parallel.proof.outside_state import OutsideState
from nbkit.rank.parallel.reshard.load_local_shards import fill_weights
from nbkit.rank.parallel.shard_layouts import ShardLayouts
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

_CPU = torch.device("cpu")

Optimizer = Callable[[Mapping[str, nn.Parameter], bool], Any]
"""(parameters by name, whether to update them the plainest way it has) -> an optimizer of them, on the CPU."""


@dataclass(frozen=True)
class Batch:
    """What a step is made on, and with. rows: of data. microbatch_size: as of the Trainer.

    outside: what user code changes beside the models: each rank finds it as it was, and as itself has left it.
    """

    data: Any
    rows: int
    loss: Loss
    inputs: Sequence[str] | None
    optimizer: Optimizer
    microbatch_size: int | None = None
    outside: OutsideState | None = None


@dataclass(frozen=True)
class Stepped:
    """What a step computed. norm: of the gradients, which are clipped to half of it.

    gradients: by name, what a rank holds of each; None where it has none. weights: by name, what it computes with
    after the update. buffers: those that a checkpoint holds, as the forward passes left them. unmade: why there was no
    update.
    """

    loss: float
    norm: float
    gradients: Mapping[str, tuple[Tensor | None, Layout]]
    weights: Mapping[str, tuple[Tensor, Layout]]
    buffers: Mapping[str, Tensor]
    unmade: str = ""


@dataclass(frozen=True)
class _Rank:
    """One rank's: total and weight of the loss of its rows, 0 where another rank's count; and as Stepped."""

    total: float
    weight: float
    norm: float
    gradients: dict[str, tuple[Tensor | None, Layout]]
    weights: dict[str, tuple[Tensor, Layout]]
    buffers: dict[str, Tensor]


def step_of_one(model: nn.Module, batch: Batch, options: Options) -> Stepped:
    """By one process. Leaves the gradients and the new weights in `model`."""
    with stand_in(Alone()):
        return _step_of_one(model, batch, options)


def _step_of_one(model: nn.Module, batch: Batch, options: Options) -> Stepped:
    draws = KeyedDropout(model, 0, options.draws)
    if batch.outside is not None:
        batch.outside.put_back()
    try:
        value, target = pair(batch.data, batch.inputs)
        with draws.step(0, range(batch.rows)), torch.enable_grad():
            weighed = weigh(batch.loss(call(model, value), target), batch.rows)
        mean = weighed.value / weighed.weight if weighed.summed else weighed.value
        mean.backward()
    finally:
        draws.release()
    params = dict(model.named_parameters())
    grads = [p.grad for p in params.values() if p.grad is not None]
    sizes = [(grad.abs() if grad.is_complex() else grad).double().norm() for grad in grads]
    norm, unmade = float(torch.stack(sizes).norm()), ""
    for grad in grads:
        grad.mul_(norm / 2 / (norm + 1e-6))  # as torch clips
    try:
        batch.optimizer(params, True).step()
    except Exception as error:  # such as one that has kernels for GPUs alone
        unmade = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    whole = {name: Layout.whole(p.shape) for name, p in params.items()}
    gradients = {name: (p.grad, whole[name]) for name, p in params.items()}
    weights = {} if unmade else {name: (p.detach(), whole[name]) for name, p in params.items()}
    return Stepped(float(mean.detach()), norm, gradients, weights, _buffers(model), unmade)


def _buffers(module: nn.Module, kept: Collection[str] | None = None) -> dict[str, Tensor]:
    """Those that a checkpoint takes. kept: names of those that it takes from this rank, which holds others too."""
    held = dict(module.named_buffers())
    return {name: held[name].detach() for name in watched(module) if kept is None or name in kept}


def steps_of_ranks(
    model: nn.Module,
    strategy: Strategy,
    batch: Batch,
    options: Options,
    max_norm: float | None,
    *,
    updated: bool = True,
) -> list[Stepped]:
    """By the ranks of `strategy`, as each sees it. model: whole, whose weights they take.

    max_norm: what the gradients are clipped to; None takes half of their norm. updated: the optimizer makes its step.
    Raises what a rank raises, and StrategyError for what cannot be split.
    """
    skeleton = skeleton_of(model)
    rank_layouts = ShardLayouts(skeleton, options).of(strategy)
    ranks: ThreadRanks[_Rank] = ThreadRanks(strategy.mesh.size)
    if (outside := batch.outside) is not None:
        ranks = ThreadRanks(strategy.mesh.size, leave=outside.held, enter=outside.put)
    meetings: dict[tuple[str, tuple[int, ...]], ThreadMeeting] = {}

    def meeting(axis: str, members: tuple[int, ...]) -> ThreadMeeting:
        return meetings.setdefault((axis, members), ThreadMeeting(ranks, members))

    def of_rank(rank: int) -> _Rank:
        if outside is not None:
            outside.put_back()
        # What the model or the loss sends itself goes between these ranks too.
        with stand_in(meeting("user", tuple(range(strategy.mesh.size))).group_of(rank)):
            return step_of_rank(rank)

    def step_of_rank(rank: int) -> _Rank:
        connections = connect_threads(strategy, rank_layouts, rank, meeting)
        sharded_model = cut(skeleton, strategy, connections, options=options, device=_CPU).build(_CPU)
        fill_weights(sharded_model, model)
        axes, held = sharded_model.axes, sharded_model.held
        shard = shard_of(batch.data, ranks=axes.size("dp"), rank=axes.index("dp"))
        micros = micro_batches(shard, sharded_model, batch.microbatch_size, _CPU)
        counted = options.counted if parts_rows(options, strategy) else None
        whole = whole_of(shard, counted, sharded_model, _CPU)
        expected = batch.rows * (counted.per_row if counted is not None else 1)
        forward_pass = ForwardPass(sharded_model, batch.loss, batch.inputs)
        draws, sums, summed = KeyedDropout(sharded_model.module, 0, options.draws), [0.0, 0.0], False

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            nonlocal summed
            micro = micros[number]
            with draws.step(0, micro.numbers):
                output, part, _ = forward_pass.run(micro, stage, received, counted, whole)
            if part is None:
                return output  # type: ignore[no-any-return]
            summed = part.summed
            sums[0] += float(part.total.detach())
            sums[1] += float(part.weight)
            return (part.value if part.summed else part.value * (part.weight / expected),)

        module = sharded_model.module
        kept = watched(module)
        sharded_model.data.reset(passes=most_passes(shard, sharded_model, batch.microbatch_size))
        sharded_model.backward(len(micros), forward, key=lambda i: shapes_of(micros[i].data), launch=lambda: None)
        check_buffers(module, kept, axes=axes, device=_CPU)
        numbers = torch.tensor([*sums, float(summed)] if sharded_model.counts else [0.0] * 3, dtype=torch.float64)
        if connections.world is not None:
            torch.distributed.all_reduce(numbers, group=connections.world)
        total, weight, is_sum = numbers.tolist()
        factor = 1 / weight if is_sum else expected / weight if counted is not None else 1.0
        for p in held.values():
            if p.grad is not None and factor != 1:
                p.grad.mul_(factor)
        norm, data = sharded_model.grad_norm(_CPU), sharded_model.data
        clip(held, float(norm) / 2 if max_norm is None else max_norm, norm)
        gradients = {name: (p.grad, data.layouts[name]) for name, p in held.items()}
        if updated:
            batch.optimizer(held, False).step()
            data.after_step()
        weights = dict(data.weights) if updated else {}
        return _Rank(total, weight, float(norm), gradients, weights, _buffers(module, rank_layouts.buffers[rank]))

    return [Stepped(r.total / r.weight, r.norm, r.gradients, r.weights, r.buffers) for r in ranks.run(of_rank)]
