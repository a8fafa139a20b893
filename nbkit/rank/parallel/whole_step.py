"""Prove a strategy with a whole step: its ranks, run as threads of one process, must match a step of one process.

The proofs of blocks, splits and positions look at parts of a model. Some errors appear only in a whole step: in shared
weights, the head, the loss, modules that are called more than once, sums over dp, and the norm. The weights are drawn,
and none is zero, because a zero would hide errors behind it. The step runs in float64 if the model can compute in it.
The ranks run the code that trains. They send nothing, and may run in any thread.

This module makes the step of one process with plain torch, makes the steps of the ranks, and describes the differences
in words.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError
from nbkit.planner.validate import Finding
from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import Alone, ThreadMeeting, ThreadRanks
from nbkit.rank.data.batch import call, pair, pick, rows_of, shapes_of, shard_of
from nbkit.rank.host_memory import free_on_host
from nbkit.rank.loss.mean_over_rows import coarsest
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.reads_model import ReadsParameters
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.grad_norm import clip
from nbkit.rank.parallel.judge import explained
from nbkit.rank.parallel.micro_batch import ForwardPass, micro_batches, most_passes, whole_of
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.parallel.module.batch_norm import batch_norms, check_buffers, watched
from nbkit.rank.parallel.module.copies import (
    homes,
    marked,
    parameter_like,
    placeholder,
    replace_submodule,
    skeleton_of,
    take_buffers,
)
from nbkit.rank.parallel.parallelize import cut
from nbkit.rank.parallel.plan import ParallelPlan, keeps_whole, make_plan, parts_rows, refusals
from nbkit.rank.parallel.process_groups import connect_threads
from nbkit.rank.parallel.proof.outside_state import OutsideSnapshot, OutsideState, outside_kept
from nbkit.rank.parallel.proof.unchanged import attributes_kept
from nbkit.rank.parallel.reshard.load_local_shards import fill_weights
from nbkit.rank.parallel.reshard.plain_attributes import plain_attributes, put
from nbkit.rank.rng.host_generators import Drawn
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.schedules import type_of
from nbkit.strategy import Strategy, divisors
from nbkit.techniques import Settings, class_in, key_of
from nbkit.tensor_layout import Layout

_CPU = torch.device("cpu")

Optimizer = Callable[[Mapping[str, nn.Parameter], bool], Any]
"""(parameters by name, whether to use the plainest update) -> an optimizer for them, on the CPU."""


@dataclass(frozen=True)
class Batch:
    """The data and settings of a step.

    rows: the number of rows of `data`. microbatch_size: as for the Trainer. outside: the state outside the models that
    user code changes. Each rank starts with its original value, and later finds it as it left it.
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
    """The result of a step.

    norm: the norm of the gradients before they are clipped to half of it. gradients: by name, the part of each gradient
    that a rank holds; None if there is no gradient. weights: by name, the weights after the update. buffers: the
    buffers that a checkpoint saves, after the forward passes. unmade: why there was no update, or "". changed: the
    parameters that the forward pass changes in place.
    """

    loss: float
    norm: float
    gradients: Mapping[str, tuple[Tensor | None, Layout]]
    weights: Mapping[str, tuple[Tensor, Layout]]
    buffers: Mapping[str, Tensor]
    unmade: str = ""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rank:
    """The result of a step on one rank.

    total, weight: of the loss of its rows, or 0 if the loss of another rank counts. The other fields are as in Stepped.
    """

    total: float
    weight: float
    norm: float
    gradients: dict[str, tuple[Tensor | None, Layout]]
    weights: dict[str, tuple[Tensor, Layout]]
    buffers: dict[str, Tensor]


def step_of_one(model: nn.Module, batch: Batch, facts: ModelFacts) -> Stepped:
    """Make a step in one process. The gradients and the new weights are left in `model`."""
    with stand_in(Alone()):
        return _step_of_one(model, batch, facts)


def _step_of_one(model: nn.Module, batch: Batch, facts: ModelFacts) -> Stepped:
    draws = KeyedDropout(model, 0, facts.draws)
    if batch.outside is not None:
        batch.outside.put_back()
    params = dict(model.named_parameters())
    versions = {name: p._version for name, p in params.items()}
    try:
        value, target = pair(batch.data, batch.inputs)
        with draws.step(0, range(batch.rows)), torch.enable_grad():
            weighed = weigh(batch.loss(call(model, value), target), batch.rows)
        mean = weighed.value / weighed.weight if weighed.summed else weighed.value
        mean.backward()
    finally:
        draws.release()
    changed = tuple(name for name, p in params.items() if p._version != versions[name])
    grads = [p.grad for p in params.values() if p.grad is not None]
    sizes = [(grad.abs() if grad.is_complex() else grad).double().norm() for grad in grads]
    norm, unmade = float(torch.stack(sizes).norm()), ""
    for grad in grads:
        grad.mul_(norm / 2 / (norm + 1e-6))  # the same formula as torch
    try:
        batch.optimizer(params, True).step()
    except Exception as error:  # for example, an optimizer whose kernels run only on GPUs
        unmade = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    whole = {name: Layout.whole(p.shape) for name, p in params.items()}
    gradients = {name: (p.grad, whole[name]) for name, p in params.items()}
    weights = {} if unmade else {name: (p.detach(), whole[name]) for name, p in params.items()}
    return Stepped(float(mean.detach()), norm, gradients, weights, _buffers(model), unmade, changed)


def _buffers(module: nn.Module, kept: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint saves.

    kept: names of the buffers that it saves from this rank.
    """
    held = dict(module.named_buffers())
    return {name: held[name].detach() for name in watched(module) if kept is None or name in kept}


def steps_of_ranks(
    model: nn.Module,
    plan: ParallelPlan,
    batch: Batch,
    max_norm: float | None,
    *,
    updated: bool = True,
) -> list[Stepped]:
    """Make a step on the ranks of `plan`. Return the result of each rank.

    model: the whole model in any dtype, from which the ranks take their weights. max_norm: norm to which the gradients
    are clipped; None means half of their norm. updated: whether the optimizer makes its step. Raises the error of a
    rank, and StrategyError for what cannot be split.
    """
    strategy, facts = plan.strategy, plan.facts
    plan = make_plan(strategy, replace(facts, shapes=facts.shapes.like(skeleton_of(model))), plan.options)
    outside = batch.outside
    shares_draws = facts.draws is not None and facts.draws.hosts  # Python and numpy have one generator for all threads

    def leave() -> tuple[OutsideSnapshot | None, Drawn | None]:
        return outside.held() if outside is not None else None, Drawn.so_far() if shares_draws else None

    def enter(left: tuple[OutsideSnapshot | None, Drawn | None]) -> None:
        if outside is not None and left[0] is not None:
            outside.put(left[0])
        if left[1] is not None:
            left[1].restore()

    ranks: ThreadRanks[_Rank] = ThreadRanks(strategy.mesh.size, leave=leave, enter=enter)
    meetings: dict[tuple[str, tuple[int, ...]], ThreadMeeting] = {}

    def meeting(axis: str, members: tuple[int, ...]) -> ThreadMeeting:
        return meetings.setdefault((axis, members), ThreadMeeting(ranks, members))

    def of_rank(rank: int) -> _Rank:
        if outside is not None:
            outside.put_back()
        # Collectives of the model or the loss run between these ranks too.
        with stand_in(meeting("user", tuple(range(strategy.mesh.size))).group_of(rank)):
            return step_of_rank(rank)

    def step_of_rank(rank: int) -> _Rank:
        connections = connect_threads(plan, rank, meeting)
        sharded_model = cut(plan, connections, device=_CPU).build(_CPU)
        fill_weights(sharded_model, model)
        axes, held = sharded_model.axes, sharded_model.held
        shard = shard_of(batch.data, ranks=axes.size("dp"), rank=axes.index("dp"))
        micros = micro_batches(shard, sharded_model, batch.microbatch_size, _CPU)
        counted = facts.counted if parts_rows(strategy, plan.options) else None
        whole = whole_of(shard, counted, sharded_model, _CPU)
        expected = batch.rows * (counted.per_row if counted is not None else 1)
        forward_pass = ForwardPass(sharded_model, batch.loss, batch.inputs)
        draws, sums, summed = KeyedDropout(sharded_model.module, 0, facts.draws), [0.0, 0.0], False

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
        gradients = {name: (p.grad, sharded_model.layouts[name]) for name, p in held.items()}
        if updated:
            batch.optimizer(held, False).step()
            sharded_model.after_step()
        weights = dict(data.weights) if updated else {}
        return _Rank(total, weight, float(norm), gradients, weights, _buffers(module, plan.layouts.buffers[rank]))

    return [Stepped(r.total / r.weight, r.norm, r.gradients, r.weights, r.buffers) for r in ranks.run(of_rank)]


_LEAST = 1e-3  # a fraction of the norm of all gradients; smaller gradients are compared on this scale


def differences(whole: Stepped, rank: Stepped, tolerance: float) -> Iterator[str]:
    """Yield the differences in loss, norm and gradients, in words.

    tolerance: the relative tolerance of one number. Sums of many numbers have a larger tolerance.
    """
    # `not <=` also finds values that are not finite.
    if not abs(whole.loss - rank.loss) <= tolerance * max(abs(whole.loss), 1e-3):
        yield f"loss {rank.loss:.6g} instead of {whole.loss:.6g}"
    if not abs(whole.norm - rank.norm) <= 8 * tolerance * whole.norm:
        yield f"norm of the gradients {rank.norm:.6g} instead of {whole.norm:.6g}"
    for name, (grad, layout) in rank.gradients.items():
        expected = whole.gradients[name][0]
        off = _off(grad, expected, layout)
        clipped = whole.norm / 2
        if off > 64 * tolerance * _LEAST * clipped and off > 64 * tolerance * _scale(expected, clipped):
            yield f"gradient of {name!r} differs by {off:.3g}, of {_scale(expected, 0):.3g}"


def updates_off(
    whole: Stepped, ranks: Sequence[Stepped], before: Mapping[str, Tensor], tolerance: float
) -> Iterator[str]:
    """Yield the differences in the weights after the optimizer's step, in words. before: the old weights, by name."""
    sizes = {name: (_largest(true - before[name]), _largest(before[name])) for name, (true, _) in whole.weights.items()}
    for name, (held, layout) in ((name, part) for rank in ranks for name, part in rank.weights.items()):
        (true, _), (grad, _), (moved, size) = whole.weights[name], whole.gradients[name], sizes[name]
        # Weights are rounded. An optimizer may use only the sign of a gradient, even one that is nearly zero.
        bound = 64 * tolerance * moved + 8 * torch.finfo(true.dtype).eps * size if moved else 0.0
        if _off(held, true, layout) > bound:
            sure = None if grad is None else _dense(grad).abs() > 64 * tolerance * _scale(grad, whole.norm / 2)
            if (off := _off(held, true, layout, sure)) > bound:
                yield f"update of {name!r} differs by {off:.3g}, of {moved:.3g}"


def buffers_off(whole: Stepped, ranks: Sequence[Stepped], tolerance: float) -> Iterator[str]:
    """Yield the differences in the buffers that the forward passes changed, in words.

    For example, a statistic of a micro-batch differs from the statistic of the batch. A buffer that has another shape
    on a rank is a part of the whole buffer, and is not compared. Its errors show in the gradients.
    """
    for name, held in ((name, buffer) for rank in ranks for name, buffer in rank.buffers.items()):
        true = whole.buffers.get(name)
        if true is None or true.shape != held.shape:
            continue
        # Masks contain values that are not finite.
        held, true = (x if x.is_floating_point() else x.to(torch.float64) for x in (held, true))
        away = (held - true).masked_fill((held == true) | (held.isnan() & true.isnan()), 0)
        if (off := _largest(away)) > 64 * tolerance * _largest(true.nan_to_num(0, 0, 0)):
            yield f"buffer {name!r} differs by {off:.3g}, of {_largest(true):.3g}"


def _scale(expected: Tensor | None, norm: float) -> float:
    return max(_largest(_dense(expected)) if expected is not None else 0.0, _LEAST * norm)


def _largest(x: Tensor) -> float:
    """Return the largest absolute value, or inf if a value is NaN."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.abs() if x.is_complex() else x)
    found = max(abs(float(low)), abs(float(high)))
    return found if isfinite(found) and isfinite(float(low)) else inf


def _off(own: Tensor | None, true: Tensor | None, layout: Layout, sure: Tensor | None = None) -> float:
    """Return the largest difference between a rank's part and the same part of the whole tensor. None counts as zeros.

    sure: mask over the whole tensor of the elements that are compared.
    """
    if own is None and true is None:
        return 0.0
    largest, nothing = 0.0, torch.zeros(())
    for here, there in layout.pieces:
        away = (_dense(own)[here.slices] if own is not None else nothing) - (
            _dense(true)[there.slices] if true is not None else nothing
        )
        largest = max(largest, _largest(away if sure is None else away.where(sure[there.slices], nothing.to(away))))
    return largest


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


_PERIOD = 65521  # a prime, so that no two rows of a matrix get the same numbers


def drawn_model(skeleton: nn.Module, dtype: torch.dtype, *, positive: bool = False) -> nn.Module:
    """Return a copy of `skeleton` on the CPU, with memory. Floating-point parameters and buffers are in `dtype`.

    positive: True for weights above zero only. The numbers come from a separate generator, because another thread may
    train.
    """
    return _draw(skeleton_of(skeleton), dtype, positive)


class Reference:
    """A second model from the user's callable. A proof uses it for the step of one process.

    The code that makes the copies of a strategy has not touched it. It has memory only while it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._one = module, threading.Lock()

    @contextmanager
    def drawn(self, like: nn.Module, dtype: torch.dtype, *, positive: bool = False) -> Iterator[nn.Module]:
        """Yield the model with the weights of `drawn_model(like)`, and with the changes made to the skeleton `like`."""
        with self._one, attributes_kept(self.module):
            put(plain_attributes(like), self.module)
            take_buffers(self.module, like)
            empty = {name: getattr(*places[0]) for name, places in homes(like).items()}
            for name, places in homes(self.module).items():
                replace_submodule(places, placeholder(empty[name].shape, empty[name]))
            try:
                yield _draw(self.module, dtype, positive)
            finally:
                for name, places in homes(self.module).items():
                    replace_submodule(places, placeholder(empty[name].shape, empty[name]))


def _draw(model: nn.Module, dtype: torch.dtype, positive: bool) -> nn.Module:
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(2)
    numbers = (numbers.abs() + 0.01 if positive else numbers).to(dtype)
    start = 0
    for name, places in homes(model).items():
        old: nn.Parameter = getattr(*places[0])
        kind = dtype if old.is_floating_point() else old.dtype
        replace_submodule(places, parameter_like(_drawn(old, name, numbers[start:]).to(kind), old))
        start = (start + old.numel()) % _PERIOD
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                # Copy them: a forward may change them, and the model has several copies.
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = marked(buffer.detach().to("cpu", kind, copy=True), buffer)
    return model


def _drawn(old: nn.Parameter, name: str, numbers: Tensor) -> Tensor:
    size = old.numel()
    enough = numbers if size <= _PERIOD else numbers[:_PERIOD].repeat(size // _PERIOD + 1)
    noise = enough[:size].view(old.shape)
    if old.ndim > 1:
        # Keep sums of this many products as large as their inputs.
        return noise / math.sqrt(max(size // max(old.shape[0], 1), 1))
    return 0.2 * noise + (0 if name.endswith("bias") else 1)


_EXACT, _EXACT_NORMS, WIDE = 1 << 22, 1 << 26, 1 << 30
"""Limits on the number of parameters. A model above _EXACT is run in float32 on fewer rows. A model above WIDE is not
run, because that takes minutes. A model with BatchNorm up to _EXACT_NORMS is run in float64 as a last attempt."""

_OF_HOST = 0.5
"""The fraction of the host's free memory that the step may use. Other ranks build their models at the same time."""

_MANY = 8
"""Rows per rank in an attempt with more rows, made if few rows prove nothing."""

_RANKS = 32


@dataclass(frozen=True)
class StepProof:
    """The comparison of a whole step of a strategy with one process. It is empty if both agree.

    refusal: why the strategy does not train, or None. unproven: what could not be compared and why, if the strategy
    trains nevertheless.
    """

    refusal: NbkitError | None = None
    unproven: str = ""

    def finding(self, strategy: Strategy) -> Finding | None:
        """Return the finding to report before training, or None."""
        if self.refusal is not None:
            return Finding(True, self.refusal.what, self.refusal.numbers or "", self.refusal.hint or "")
        if self.unproven:
            return Finding(False, f"Only a part of {strategy} was compared with one process.", self.unproven)
        return None


def tiny(strategy: Strategy) -> Strategy:
    """Return the smallest strategy with the same composition as `strategy`. Two ranks of dp behave like more of them.

    Keys about how gradients are sent are left out, except a user's class. If the strategy still has too many ranks to
    run, it gets fewer stages and fewer parts of the positions.
    """
    groups = 2 if strategy.shard < strategy.dp else 1
    shard = min(strategy.shard, 2)
    dp = min(strategy.dp, groups * shard if strategy.zero else 2)
    ep = min(strategy.ep, 2)
    if ep > 1:  # with a second group if the strategy has several
        dp = shard = 2 * ep if strategy.ep < strategy.dp else ep
    kept = Settings.of({name: value for name, value in strategy.settings.items() if key_of(name).rehearsed})
    small = replace(strategy, dp=dp, ep=ep, shard=shard if strategy.zero else 0, speeds=(), settings=kept)
    for axis in ("pp", "cp"):
        for degree in reversed(divisors(getattr(strategy, axis))):
            if small.mesh.size > _RANKS and 1 < degree < getattr(small, axis):
                fewer: dict[str, Any] = {axis: degree}
                small = replace(small, **fewer)
    return small


def prove_step(
    plan: ParallelPlan,
    example: Any,
    *,
    loss: Loss | None,
    inputs: Sequence[str] | None,
    optimizer: Optimizer | None = None,
    microbatch_size: int | None = None,
    short: Any = None,
    many: Any = None,
    reference: Reference | None = None,
) -> StepProof:
    """Compare a step of `plan` with a step of one process. Sends nothing.

    The weights of the model are drawn. example: some rows of the data. loss: None means a sum over the first tensor of
    the model's output. optimizer: None means SGD. reference: the same model, built again, for the step of one process;
    None means a copy.

    If one process cannot make a step to compare with, a split of the model (tp, pp, cp, ZeRO 3) is refused. A strategy
    that only divides the rows trains, and the reason is given.

    short: the example with few positions, which proves as much (see short_example.py). If positions are split, blocks
    were already compared on all positions. If the short example does not prove the strategy, the full example is tried.
    many: more rows than in the example, if known, for a model whose BatchNorm computes its statistics from them. With
    two rows of one position, BatchNorm divides by the difference of two numbers, and a rounding error grows from layer
    to layer. This last attempt runs in float64.
    """
    if (own := class_in(plan.strategy)) is not None and (wrong := explained(own)) is not None:
        return StepProof(wrong)
    if plan.facts.astray:
        return StepProof(unproven=plan.facts.astray)
    how: dict[str, Any] = {"loss": loss, "inputs": inputs, "optimizer": optimizer, "microbatch_size": microbatch_size}
    how["reference"] = reference
    proof = None
    if short is not None:
        proof = _proof(plan, short, **how)
    if proof != StepProof():
        proof = _proof(plan, example, **how)
    if proof != StepProof() and batch_norms(plan.facts.shapes.skeleton):
        proof = _proof(plan, example if many is None else many, each=_MANY, exact=_EXACT_NORMS, **how)
    if proof.refusal is not None and _ANOTHER in proof.refusal.hint and not _trains_under_ddp(plan, example, how):
        proof.refusal.hint = proof.refusal.hint.replace(_ANOTHER, _ALONE)
    return proof


def _trains_under_ddp(plan: ParallelPlan, example: Any, how: Mapping[str, Any]) -> bool:
    """Return True if nbkit does not refuse plain data parallelism too. Otherwise a hint must not name it."""
    ddp = ParallelPlan(Strategy(dp=max(2, plan.strategy.mesh.size)), plan.facts, plan.options)
    return not any(refusals(ddp.strategy, ddp.facts, ddp.options)) and _proof(ddp, example, **how).refusal is None


def _proof(
    plan: ParallelPlan,
    example: Any,
    *,
    loss: Loss | None,
    inputs: Sequence[str] | None,
    optimizer: Optimizer | None,
    microbatch_size: int | None,
    reference: Reference | None,
    each: int = 2,
    exact: int = _EXACT,
) -> StepProof:
    """Prove a step with `each` rows per rank. A model with more than `exact` parameters uses one row, in float32."""
    strategy, facts, skeleton = plan.strategy, plan.facts, plan.facts.shapes.skeleton
    small = tiny(strategy)
    if small.mesh.size == 1 and microbatch_size is None and plan.options.loss_chunks == 1:
        return StepProof()
    size = sum(getattr(*places[0]).numel() for places in homes(skeleton).values())
    if example is None and microbatch_size is None and plan.options.loss_chunks == 1 and not _cuts(strategy):
        return StepProof()  # each rank runs the whole model, as one process does
    if beforehand := _unmakeable(small, facts, example, size):
        return StepProof(unproven=f"no whole step: {beforehand}")
    # The ranks are threads of one process, so they are on one node.
    of_ranks = ParallelPlan(small, facts, replace(plan.options, compile=False, fp8=False))
    # The mean of an auxiliary term over parts of a batch differs from that over the batch. So one process uses the same
    # parts.
    in_parts = facts.coupled is not None and parts_rows(strategy, plan.options)
    rows = _rows(small, 1 if size > exact or in_parts else each, microbatch_size)
    if facts.collectives:
        rows = max(each, 2) * small.dp * (small.microbatches or 1)  # all ranks make equal calls, on equally many rows
    # The models of one process and of the ranks share the state outside of them.
    outside = OutsideState(skeleton, loss) if facts.outside is not None or facts.changes else None
    why = ""
    for dtype, positive in _DRAWS[size > exact :]:
        try:
            data = _data(example, rows, dtype)
            how = (loss or _sum_of_output, inputs, optimizer or _Descent, microbatch_size and 1)
            batch = Batch(data, rows, *how, outside)
            with coarsest() as seen:
                whole = _alone(of_ranks, reference, dtype, positive, batch, in_parts)
        except ReadsParameters as error:
            return StepProof(error)
        except Exception as error:
            why = why or f"a step of {rows} rows in one process fails: {_told(error)}"
            continue
        if not isfinite(whole.loss + whole.norm):
            why = (
                why
                or f"with random weights, the loss is {whole.loss:.3g} and the norm of its gradients is "
                f"{whole.norm:.3g}"
            )
            continue
        model = drawn_model(skeleton, dtype, positive=positive)
        refusal = _compared(model, whole, strategy, of_ranks, batch, seen.eps)
        if refusal is None:
            return StepProof(unproven=whole.unmade and f"the optimizer cannot make a step on the CPU: {whole.unmade}")
        # If one process does not reproduce its own step, that step cannot be compared with the ranks.
        again = _alone(of_ranks, reference, dtype, positive, batch, in_parts)
        if not any(differences(whole, again, max(1e-9, 64 * seen.eps))):
            return StepProof(refusal)
        why = f"one process gets another result for the same step: loss {whole.loss:.6g}, then {again.loss:.6g}"
        break
    unknown = _cuts(strategy) or facts.collectives
    return StepProof(_unprovable(strategy, why) if unknown else None, f"no whole step: {why}")


_DRAWS = ((torch.float64, False), (torch.float32, False), (torch.float32, True))
"""(dtype, only positive weights), tried in this order. A model that takes logarithms of weights needs the last one."""


def _cuts(strategy: Strategy) -> bool:
    """Return True if a rank computes with a part of the model or of a row."""
    return strategy.dp < strategy.mesh.size or strategy.zero == 3 or strategy.ep > 1


def _unmakeable(small: Strategy, facts: ModelFacts, example: Any, size: int) -> str:
    """Return why a model of `size` parameters cannot make a step of `small`, or ""."""
    if example is None:
        return "no example batch to run: hints=nbkit.ModelHints(example=batch); nbkit.check(model, strategy, batch)"
    if facts.draws is not None and facts.draws.unkeyed:
        return f"the model draws random numbers that depend on the strategy: {facts.draws.unkeyed[0]}"
    if small.mesh.size > _RANKS:
        return f"{small.mesh.size} ranks, and a test in one process has at most {_RANKS}"
    if size > WIDE:
        return f"{size / 1e6:,.0f} M parameters, more than {WIDE / 1e6:,.0f} M; only single blocks were tested"
    if size > _EXACT:
        needed, free = size * _bytes_of_parameter(small), free_on_host()
        if free is not None and needed > _OF_HOST * free:
            return (
                f"{size / 1e6:,.0f} M parameters take about {needed / 1e9:.1f} GB, more than half of the "
                f"{free / 1e9:.1f} GB that are free on the host; only single blocks were tested"
            )
    return ""


def _bytes_of_parameter(small: Strategy) -> int:
    """Return the bytes per parameter that a step takes, in float32 with AdamW.

    They include the drawn weights, the model of one process, and the parts of each rank.
    """
    return 12 + 16 * small.mesh.size // (small.tp * small.pp)


def _unprovable(strategy: Strategy, why: str) -> StrategyError:
    return StrategyError(
        f"nbkit cannot compare {strategy} with one process, so it does not train this model with it.",
        numbers=why,
        hint=_hint(strategy),
    )


def _alone(
    plan: ParallelPlan,
    reference: Reference | None,
    dtype: torch.dtype,
    positive: bool,
    batch: Batch,
    in_parts: bool,
) -> Stepped:
    """Make the step of one process. in_parts: use one forward pass per row, as the ranks of `plan` do."""
    facts, skeleton = plan.facts, plan.facts.shapes.skeleton
    if reference is not None and not in_parts:
        with reference.drawn(skeleton, dtype, positive=positive) as model:
            # The reference is run again for the next proof.
            with outside_kept(model) if facts.outside is not None else nullcontext():
                return step_of_one(model, batch, facts)
    model = drawn_model(skeleton, dtype, positive=positive)
    if not in_parts:
        return step_of_one(model, batch, facts)
    alone = ParallelPlan(Strategy(), facts, replace(plan.options, cut=True))
    (stepped,) = steps_of_ranks(model, alone, replace(batch, microbatch_size=1), None)
    return stepped


def _compared(
    model: nn.Module, whole: Stepped, strategy: Strategy, plan: ParallelPlan, batch: Batch, eps: float
) -> NbkitError | None:
    """Return why `strategy` is refused after a step of the smaller `plan`, or None if the step matches `whole`."""
    facts = plan.facts
    try:
        ranks = steps_of_ranks(model, plan, batch, whole.norm / 2, updated=not whole.unmade)
    except NbkitError as error:
        return error
    except Exception as error:
        compiled = _compiled(facts, error)
        return StrategyError(
            f"Under {strategy}, a step of {batch.rows} rows of this model fails.",
            numbers=compiled or _told(error) + _called(facts),
            hint="the model without torch.compile; or " * bool(compiled) + _hint(strategy),
        )
    tolerance, before = max(1e-9, 64 * eps), {name: p.detach() for name, p in model.named_parameters()}
    found = [text for rank in ranks for text in differences(whole, rank, tolerance)]
    # Report a wrong gradient itself, not the wrong update that follows from it.
    found = found or [*updates_off(whole, ranks, before, tolerance), *buffers_off(whole, ranks, tolerance)]
    if not found:
        return None
    return StrategyError(
        f"{strategy} does not train this model as one process does.",
        numbers=f"a step of {batch.rows} rows: {'; '.join(list(dict.fromkeys(found))[:3])}{_called(facts)}"
        + _changes(model, whole, strategy, batch),
        hint="change it between two steps, in a callback of the Trainer; or " * bool(whole.changed) + _hint(strategy),
    )


def _changes(model: nn.Module, whole: Stepped, strategy: Strategy, batch: Batch) -> str:
    """Return the end of a sentence that names a parameter or buffer that the forward pass changes, or ""."""
    if whole.changed:
        return f"; the forward pass changes its parameter {whole.changed[0]!r} in place"
    if (strategy.microbatches or 1) == 1 and batch.microbatch_size is None:
        return ""
    before = dict(model.named_buffers())
    moved = [name for name, after in whole.buffers.items() if not torch.equal(before[name].to(after), after)]
    if not moved:
        return ""
    others = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    return f"; each forward pass changes the buffer {moved[0]!r}{others}, and a step makes several passes"


def _compiled(facts: ModelFacts, error: Exception) -> str:
    """Return a text that names the compiled part of the model, if it caused this error of torch; otherwise ""."""
    if not type(error).__module__.startswith("torch._dynamo"):
        return ""
    for name, part in facts.shapes.skeleton.named_modules():
        if part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule":
            of = repr(name) if name else "the model"
            return f"torch.compile compiled {of}, and cannot trace the collectives that the strategy puts into it"
    return ""


def _called(facts: ModelFacts) -> str:
    return f"; the model or the loss calls {facts.collectives} itself" if facts.collectives else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


_ANOTHER, _ALONE = "another strategy, such as 'ddp'", "%cluster start -n 1   trains it on one rank"


def _hint(strategy: Strategy) -> str:
    """Return what to type. `prove_step` replaces the other strategy if it is refused too."""
    return _ALONE if keeps_whole(strategy) else _ANOTHER


def _sum_of_output(output: Any, _: Any) -> tuple[Tensor, int]:
    first = next(x for x in leaves(output).values() if x.is_floating_point() and x.ndim)
    weights = torch.randn(first.shape[-1], generator=torch.Generator().manual_seed(1)).to(first.dtype)
    return (first * weights).sum(), first.shape[0]


def _rows(strategy: Strategy, each: int, microbatch_size: int | None) -> int:
    """Return the number of rows for a step of `strategy` with `each` rows per rank.

    If each of several ranks has two rows or more, one of them gets one row less. This tests the weights of ranks.
    """
    if strategy.schedule and type_of(strategy.schedule).microbatches_per_rank > 1:
        return (strategy.microbatches or 1) * strategy.dp
    if strategy.pp > 1 or microbatch_size is not None:
        return max(2, each) * strategy.dp
    return each * strategy.dp - (strategy.dp > 1 and each > 1)


class _Descent:
    """SGD in plain torch. The first step of an optimizer of torch imports its compiler, which takes seconds."""

    def __init__(self, held: Mapping[str, nn.Parameter], plainly: bool) -> None:
        self._held = held

    @torch.no_grad()
    def step(self) -> None:
        for p in self._held.values():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def _data(example: Any, rows: int, dtype: torch.dtype) -> Any:
    held = rows_of(example)

    def of(_: str, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()

    return with_leaves(pick(example, [row % held for row in range(rows)], rows=held), of)
