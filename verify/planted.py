"""Put known bugs of parallel training into the ranks, one at a time. The comparison must detect each.

A comparison that detects no bug proves nothing. Each bug patches the running code with a mistake that somebody could
make there, and has the case that must show it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from nbkit.rank.loss.row_weights import Weighed
from nbkit.rank.parallel import grad_norm, micro_batch
from nbkit.rank.parallel.context.attention import ContextAttentionMode
from nbkit.rank.parallel.context.peers import Threads
from nbkit.rank.parallel.data_parallel import buckets
from nbkit.rank.parallel.data_parallel.buckets import Reduction
from nbkit.rank.parallel.data_parallel.zero1_2 import ShardedOptimizer
from nbkit.rank.parallel.experts import data_axis, dispatch
from nbkit.rank.parallel.experts.data_axis import SpreadExperts
from nbkit.rank.parallel.experts.dispatch import RowCounts, SpreadLayer, _Exchange, _Stacked
from nbkit.rank.parallel.experts.find import RoutedLayers
from nbkit.rank.parallel.micro_batch import ForwardPass
from nbkit.rank.parallel.pipeline.executor import Deferred, _Run
from nbkit.rank.parallel.plan import ParallelPlan
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.parallel.tensor.apply import _Surgery
from nbkit.rank.parallel.tensor.collectives import _GatherSum, _own
from nbkit.rank.parallel.tensor.layers import PairState
from nbkit.rank.parallel.whole_step import StepProof
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.train import builder
from nbkit.rank.train.step.step import TrainingStep
from verify.cases import Case
from verify.compare import judged
from verify.rank_sets import truths
from verify.training import Outcome, train

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Bug:
    """A mistake, in words. case: the training that must show it. plant: makes the mistake while a context is open."""

    what: str
    case: Case
    plant: Plant


def unseen(bugs: Collection[Bug]) -> tuple[list[str], list[str]]:
    """Return (bugs that the comparison misses, cases that are wrong without their bug). bugs: some of BUGS."""
    green, red = [], []
    for num_ranks in (2, 4):
        numbers = [i for i, bug in enumerate(BUGS) if bug in bugs and bug.case.ranks == num_ranks]
        if numbers:
            blind, off = _unseen(numbers, num_ranks)
            green += blind
            red += off
    return green, red


def _unseen(numbers: Sequence[int], num_ranks: int) -> tuple[list[str], list[str]]:
    known = truths(BUGS[i].case for i in numbers)
    ranks = run_ranks(_with_and_without, num_ranks, numbers, timeout=1200)
    green, red = [], []
    for place, number in enumerate(numbers):
        bug = BUGS[number]
        bad, good = (judged(bug.case, [rank[place][i] for rank in ranks], known[bug.case.truth]) for i in (0, 1))
        if bad.kind == "equal":
            green.append(bug.what)
        if good.kind != "equal":
            red.append(f"{bug.case}: {good.kind} {good.text}")
    return green, red


def _with_and_without(world: Any, bugs: Sequence[int]) -> list[tuple[Outcome, Outcome]]:
    """Train the case of each bug with the bug and without it, on a rank. bugs: places in BUGS.

    With the bug, the proof step before the training is skipped, because it would refuse the bug itself; see
    tests/rank/parallel/test_whole_step.py.
    """
    found = []
    for number in bugs:
        with BUGS[number].plant(), patch.object(builder, "prove_step", lambda *_, **__: StepProof()):
            bad = train(BUGS[number].case)
        found.append((bad, train(BUGS[number].case)))
    return found


def _around(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Return a plant that replaces `owner.name` by what `make` gives for the original."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def _without(what: str) -> Callable[[Any], Any]:
    """Return a function that makes a method of ShardedModel run as if `what` were empty."""

    def make(method: Any) -> Any:
        def blind(self: ShardedModel, *args: Any) -> Any:
            if what == "partial":
                sharded_model = replace(self, partial={})
            else:
                empty: Any = {"ties": (), "replication": {}}[what]
                sharded_model = replace(self, connections=replace(self.connections, **{what: empty}))
            return method(sharded_model, *args)

        return blind

    return make


def _mean_of_means(weigh: Any) -> Any:
    def wrong(result: Any, rows: int, targets: Any = None) -> Weighed:
        right = weigh(result, rows)
        return Weighed(right.value / right.weight, torch.ones(()), right.summed)

    return wrong


def _rows_of_equal_ranks(backward: Any) -> Any:
    def wrong(self: TrainingStep, shard: Any) -> Any:
        return backward(self, replace(shard, total=max(1, shard.rows * self.sharded_model.axes.size("dp"))))

    return wrong


def _scaled_stage(backward: Any) -> Any:
    def wrong(self: Any, op: Any, grads: Any) -> Any:
        produced = backward(self, op, grads)
        return [grad / 2 for grad in produced] if op.stage == 1 else produced

    return wrong


def _lost_weight_gradient(run: Any) -> Any:
    def wrong(self: Deferred) -> None:
        self._points = self._points[1:]
        run(self)

    return wrong


def _bias_on_every_rank(end: Any) -> Any:
    return lambda self, partial, bias: end(self, partial if bias is None else partial + bias, None)


def _another_ranks_keys(cut: Any) -> Any:
    def wrong(self: Any, path: str, part: Any, widths: Any) -> None:
        team = self.team
        if path.endswith(("k_proj", "v_proj")):
            self.team = replace(team, index=(team.index + 1) % team.size)
        cut(self, path, part, widths)
        self.team = team

    return wrong


class _Unreduced:
    """A reduction whose sums are discarded, except the canary at their end."""

    def __init__(self, work: dist.Work, row: Tensor, own: Tensor) -> None:
        self.work, self.row, self.own = work, row, own

    def wait(self) -> None:
        self.work.wait()
        self.row[:-1] = self.own[:-1]


def _own_gradient(reduce_scatter: Any) -> Any:
    def wrong(row: Tensor, matrix: Tensor, **kwargs: Any) -> Any:
        own = row.clone()
        return _Unreduced(reduce_scatter(row, matrix, **kwargs), row, own)

    return wrong


def _mask_too_early(attend: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not in the proof before the training: it would detect the bug, and give the module all positions.
        late = int(self.runs[0][0] > 0 and not isinstance(self.peers, Threads))
        with patch.multiple(self, runs=tuple((start - late, stop - late) for start, stop in self.runs)):
            return attend(self, *args, **kwargs)

    return wrong


def _local_norm(_: Any) -> Any:
    return lambda self, device: grad_norm.grad_norm(self.held, {}, device=device, world_size=1)


def _gradient_twice(where: str) -> Callable[[Any], Any]:
    """Return a function that makes `SpreadExperts.finish` double the gradients inside of `where`."""

    def make(finish: Any) -> Any:
        def wrong(self: SpreadExperts) -> Tensor | None:
            canary: Tensor | None = finish(self)
            for name, param in self.held.items():
                if f".{where}." in name and param.grad is not None:
                    param.grad.mul_(2)
            return canary

        return wrong

    return make


def _no_gradient_of_rows(backward: Any) -> Any:
    return staticmethod(lambda ctx, grad, token: (0 * backward(ctx, grad, token)[0], None, None, None, None))


def _outputs(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Return a function that makes `SpreadLayer` change what comes back from the experts."""

    def make(call: Any) -> Any:
        def wrong(self: SpreadLayer, rows: Tensor, row_counts: RowCounts) -> tuple[Tensor, Tensor]:
            outputs, token = call(self, rows, row_counts)
            return change(outputs), token

        return wrong

    return make


def _idle_called(tell: Any) -> Any:
    return lambda self, counts, like: tell(self, counts.clamp(min=0), like)


def _biases_of_the_tensor_axis(compute: Any) -> Any:
    def wrong(self: Any, rows: Tensor, row_counts: RowCounts) -> Tensor:
        experts = torch.arange(len(row_counts.there[0])).repeat(len(row_counts.there))
        biases = self.module.down_proj_bias[experts.repeat_interleave(row_counts.arriving)]
        given: Tensor = compute(self, rows, row_counts) + biases
        return given

    return wrong


def _other_experts(compute: Any) -> Any:
    def wrong(self: Any, rows: Tensor, row_counts: RowCounts) -> Tensor:
        by_rank = row_counts.arriving.view(len(row_counts.there), -1)
        given: Tensor = compute(self, rows, replace(row_counts, arriving=by_rank.flip(1).flatten()))
        return given

    return wrong


def _auxiliary_of_each_rank(run: Any) -> Any:
    def wrong(self: ForwardPass, *args: Any) -> Any:
        def loss(output: Any, target: Any) -> Any:
            return self.loss(output | {"aux_loss": output["aux_loss"] * self.model.axes.size("dp")}, target)

        return run(replace(self, loss=loss), *args)

    return wrong


def _no_gradient_of_weights(routing_of: Any) -> Any:
    def wrong(*args: Any) -> Any:
        found = routing_of(*args)
        return found and (*found[:2], found[2].detach())

    return wrong


def _case(strategy: str, *extras: str, model: str = "gpt", ranks: int = 2, optimizer: str = "") -> Case:
    return Case(model, strategy, steps=2, extras=frozenset(extras), ranks=ranks, optimizer=optimizer)


BUGS = (
    Bug("the gradient of a tied weight is not summed over its stages", _case("pp", model="gpt_tied"),
        _around(ShardedModel, "_sum_partial", _without("ties"))),
    Bug("uneven losses are averaged over micro-batches and ranks as if they were even", _case("dp=2", "mask"),
        _around(micro_batch, "weigh", _mean_of_means)),
    Bug("a short last batch is averaged over ranks as if each had as many rows", _case("dp=2", "ragged"),
        _around(TrainingStep, "backward", _rows_of_equal_ranks)),
    Bug("the norms between split positions are not summed over the tensor axis", _case("tp"),
        _around(ShardedModel, "_sum_partial", _without("partial"))),
    Bug("the parameters of blocks are not summed over the context axis", _case("cp=2"),
        _around(ShardedModel, "_sum_partial", _without("partial"))),
    Bug("the gradient that a stage sends is scaled", _case("pp"), _around(_Run, "_backward", _scaled_stage)),
    Bug("a weight's gradient that was put off is forgotten", _case("pp schedule=zb"),
        _around(Deferred, "run", _lost_weight_gradient)),
    Bug("the bias of a row-parallel map is added by every rank", _case("tp"),
        _around(PairState, "end", _bias_on_every_rank)),
    Bug("the gradient of a column-parallel map's input is not summed", _case("tp"),
        _around(_GatherSum, "backward", lambda _: staticmethod(
            lambda ctx, grad: (_own(grad, ctx.group, ctx.dim, ctx.parting), None, None, None, None)))),
    Bug("queries attend to another rank's key-value heads", _case("tp", model="llama_of_8_heads"),
        _around(_Surgery, "_cut_columns", _another_ranks_keys)),
    Bug("a shard is updated from a gradient that was not summed", _case("dp=2 zero=2"),
        _around(buckets, "reduce_scatter", _own_gradient)),
    Bug("the other parts of a weight stay as they were after an update", _case("dp=2 zero=1"),
        _around(ShardedOptimizer, "after_step", lambda _: lambda self: None)),
    Bug("dropout draws from each rank's own stream", _case("dp=2", "dropout"),
        _around(KeyedDropout, "step", lambda _: lambda self, *args: nullcontext())),
    Bug("gradients are clipped by the norm of what a rank holds", _case("pp", "clip"),
        _around(ShardedModel, "grad_norm", _local_norm)),
    Bug("the norm counts what several ranks hold several times", _case("tp", "clip"),
        _around(ShardedModel, "grad_norm", _without("replication"))),
    Bug("the causal mask is off by one on later ranks", _case("cp=2"),
        _around(ContextAttentionMode, "_attend", _mask_too_early)),
    Bug("the last micro-batch is dropped", _case("pp"), _around(TrainingStep, "_cut", lambda cut: lambda self, shard: (
        cut(self, shard)[:-1]))),
    Bug("the replicas of sharding groups are not summed", _case("hsdp", ranks=4),
        _around(Reduction, "cross", lambda _: lambda self: None)),
    # Bugs of expert parallelism.
    Bug("an expert's gradient counts once for each rank that sends to it", _case("ep=2", model="mixtral"),
        _around(SpreadExperts, "finish", _gradient_twice("experts"))),
    Bug("an expert's gradient is not summed over the ranks that hold it", _case("ep=2", model="mixtral", ranks=4),
        _around(data_axis, "replicated", lambda make: lambda module, layouts, setup: (
            make(module, layouts, replace(setup, ranks=1))))),
    Bug("a shared expert's gradient is summed once more", _case("ep=2", model="qwen2_moe"),
        _around(SpreadExperts, "finish", _gradient_twice("shared_expert"))),
    Bug("an expert's bias is added by each rank of the tensor axis", _case("tp=2 ep=2", model="gpt_oss", ranks=4),
        _around(_Stacked, "compute", _biases_of_the_tensor_axis)),
    Bug("a router's auxiliary loss counts once for each rank", _case("ep=2", model="moe_auxiliary"),
        _around(ForwardPass, "run", _auxiliary_of_each_rank)),
    Bug("an expert drops its last token", _case("ep=2", model="mixtral"),
        _around(SpreadLayer, "__call__", _outputs(lambda rows: torch.cat([rows[:-1], 0 * rows[-1:]])))),
    Bug("an expert without tokens gets a gradient of zeros, and its weights decay",
        _case("ep=2", "sgd", model="moe_auxiliary", optimizer="adamw"), _around(SpreadLayer, "tell", _idle_called)),
    Bug("a token gets no gradient from the expert of another rank", _case("ep=2", model="moe_by_hand"),
        _around(_Exchange, "backward", _no_gradient_of_rows)),
    Bug("a router gets no gradient through its weights", _case("ep=2", model="mixtral"),
        _around(dispatch, "routing_of", _no_gradient_of_weights)),
    Bug("an expert's outputs come back in another order", _case("ep=2", model="moe_by_hand"),
        _around(SpreadLayer, "__call__", _outputs(lambda rows: rows.flip(0)))),
    Bug("a rank's experts stand in another order", _case("ep=2", model="mixtral"),
        _around(_Stacked, "compute", _other_experts)),
    Bug("a rank holds the weights of another rank's experts", _case("ep=2", model="mixtral"),
        _around(RoutedLayers, "parts", lambda parts: lambda self, whole, strategy, index: (
            parts(self, whole, strategy, (index + 1) % strategy.ep)))),
    Bug("the norm counts each copy of an expert", _case("ep=2", "clip", model="mixtral", ranks=4),
        lambda: patch.object(ParallelPlan, "copies", property(lambda plan: {}))),
    Bug("the norm is that of the experts on one rank", _case("ep=2", "clip", model="mixtral"),
        lambda: patch.object(ShardedModel, "holds_all_gradients", property(lambda model: True))),
)  # fmt: skip
