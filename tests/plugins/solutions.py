"""Solutions of lessons 23 to 26: the right ones, and ten wrong ones for each, with the cause to be named.

A wrong solution has one mistake that students make, and is otherwise right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.schedules import Op


class MyDDP:
    def __init__(self, model: nn.Module) -> None:
        self.under_way: list[Any] = []
        for p in model.parameters():
            dist.broadcast(p.data, src=0)

    def ready(self, parameter: nn.Parameter) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        self.under_way.append((work, parameter))

    def finish(self) -> None:
        for work, parameter in self.under_way:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.under_way.clear()


class NoBroadcast(MyDDP):
    def __init__(self, model: nn.Module) -> None:
        self.under_way = []


class BroadcastOfWeightsOnly(MyDDP):
    def __init__(self, model: nn.Module) -> None:
        self.under_way = []
        for name, p in model.named_parameters():
            if "weight" in name:
                dist.broadcast(p.data, src=0)


class SumForMean(MyDDP):
    def finish(self) -> None:
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()


class LostHook(MyDDP):
    def ready(self, parameter: nn.Parameter) -> None:
        if parameter.ndim > 1:  # biases are forgotten
            super().ready(parameter)


class NotWaitedFor(MyDDP):
    def finish(self) -> None:
        for _, parameter in self.under_way:
            parameter.grad /= dist.get_world_size()
        self.under_way.clear()


class ReducedTwice(MyDDP):
    def ready(self, parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        super().ready(parameter)


class DividedTwice(MyDDP):
    def ready(self, parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        super().ready(parameter)


class OnlyRankZero(MyDDP):
    def ready(self, parameter: nn.Parameter) -> None:
        dist.reduce(parameter.grad, dst=0)
        if dist.get_rank() == 0:
            parameter.grad /= dist.get_world_size()

    def finish(self) -> None:
        pass


class GathersAllGradients(MyDDP):
    def ready(self, parameter: nn.Parameter) -> None:
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.grad)
        parameter.grad.copy_(torch.stack(everyone).mean(0))

    def finish(self) -> None:
        pass


class DividesByTwo(MyDDP):
    def finish(self) -> None:
        for work, parameter in self.under_way:
            work.wait()
            parameter.grad /= 2
        self.under_way.clear()


class MyZeRO1:
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        each = size // ranks
        return rank * each, (rank + 1) * each

    def reduce(self, gradients: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        part = gradients.new_empty(len(gradients) // ranks)
        dist.reduce_scatter(part, list(gradients.chunk(ranks)))
        return part / ranks

    def gather(self, part: Tensor, weights: Tensor) -> Any:
        dist.all_gather(list(weights.chunk(dist.get_world_size())), part)

    def cut(self, flat: Tensor) -> Tensor:
        start, stop = self.part(len(flat), dist.get_rank(), dist.get_world_size())
        return flat[start:stop]


class EndsTooEarly(MyZeRO1):
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        each = size // ranks
        return rank * each, (rank + 1) * each - 1


class PartsOverlap(MyZeRO1):
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        each = size // ranks
        return rank * each, min((rank + 1) * each + 1, size)


class PartOfRankZero(MyZeRO1):
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        return 0, size // ranks


class SumOfShards(MyZeRO1):
    def reduce(self, gradients: Tensor) -> Tensor:
        return super().reduce(gradients) * dist.get_world_size()


class AllReduceThenCut(MyZeRO1):
    def reduce(self, gradients: Tensor) -> Tensor:
        dist.all_reduce(gradients)
        return self.cut(gradients) / dist.get_world_size()


class NeverReduced(MyZeRO1):
    def reduce(self, gradients: Tensor) -> Tensor:
        return self.cut(gradients)


class FirstPartEverywhere(MyZeRO1):
    def reduce(self, gradients: Tensor) -> Tensor:
        dist.all_reduce(gradients)
        return gradients[: len(gradients) // dist.get_world_size()] / dist.get_world_size()


class StaleWeights(MyZeRO1):
    def gather(self, part: Tensor, weights: Tensor) -> Any:
        self.cut(weights).copy_(part)


class ReturnsTheWeights(MyZeRO1):
    def gather(self, part: Tensor, weights: Tensor) -> Any:
        everyone = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, part)
        return torch.cat(everyone)


class GathersByAllReduce(MyZeRO1):
    def gather(self, part: Tensor, weights: Tensor) -> Any:
        weights.zero_()
        self.cut(weights).copy_(part)
        dist.all_reduce(weights)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _SumOfOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class _SumBothWays(_SumOfOutputs):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _SumOfGradients.backward(ctx, grad)


class MyLinears:
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        each = size // ranks
        return rank * each, (rank + 1) * each

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(_SumOfGradients.apply(x), weight, bias)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _SumOfOutputs.apply(F.linear(x, weight))
        return y if bias is None else y + bias


class ColumnWithoutBackward(MyLinears):
    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class RowWithoutSum(MyLinears):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class BiasOnEveryRank(MyLinears):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _SumOfOutputs.apply(F.linear(x, weight, bias))


class MeanOfOutputs(MyLinears):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _SumOfOutputs.apply(F.linear(x, weight)) / dist.get_world_size() + bias


class RowSumsBothWays(MyLinears):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _SumBothWays.apply(F.linear(x, weight)) + bias


class ColumnSumsForward(MyLinears):
    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _SumOfOutputs.apply(F.linear(_SumOfGradients.apply(x), weight, bias))


class FeaturesOffByOne(MyLinears):
    def part(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        each = size // ranks
        return rank * each + (rank > 0), (rank + 1) * each


class CutGraph(MyLinears):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight).detach()
        dist.all_reduce(y)
        return y + bias


class GathersOutputs(MyLinears):
    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(_SumOfGradients.apply(x), weight, bias)
        everyone = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, y.detach())
        return torch.cat(everyone, -1)


class SumsTheInputToo(MyLinears):
    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        mean = x.detach().clone()  # it is whole on every rank already
        dist.all_reduce(mean)
        x = x + (mean / dist.get_world_size() - x).detach()
        return F.linear(_SumOfGradients.apply(x), weight, bias)


def my_1f1b(ranks: int, microbatches: int, rank: int) -> list[Op]:
    first = min(microbatches, ranks - rank - 1)
    return _one_by_one(first, microbatches, rank)


def _one_by_one(first: int, microbatches: int, rank: int) -> list[Op]:
    ops = [Op("F", rank, micro) for micro in range(first)]
    for micro in range(microbatches):
        if first + micro < microbatches:
            ops.append(Op("F", rank, first + micro))
        ops.append(Op("B", rank, micro))
    return ops


def last_backward_is_missing(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return my_1f1b(ranks, microbatches, rank)[:-1]


def backward_twice(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [*my_1f1b(ranks, microbatches, rank), Op("B", rank, 0)]


def backward_before_forward(ranks: int, microbatches: int, rank: int) -> list[Op]:
    ops = []
    for micro in range(microbatches):
        ops += [Op("B", rank, micro), Op("F", rank, micro)]
    return ops


def warm_up_of_the_wrong_ranks(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return _one_by_one(min(microbatches, rank), microbatches, rank)


def stage_zero_everywhere(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op(op.kind, 0, op.micro) for op in my_1f1b(ranks, microbatches, rank)]


def keeps_everything(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op(kind, rank, micro) for kind in ("F", "B") for micro in range(microbatches)]  # type: ignore[arg-type]


def one_at_a_time(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return _one_by_one(0, microbatches, rank)


def fails_for_a_short_batch(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return _one_by_one(ranks - rank - 1, microbatches, rank)


def counts_from_one(ranks: int, microbatches: int, rank: int) -> list[Op]:
    return [Op(op.kind, rank, op.micro + 1) for op in my_1f1b(ranks, microbatches, rank)]


def forgets_to_return(ranks: int, microbatches: int, rank: int) -> Any:
    my_1f1b(ranks, microbatches, rank)


RIGHT: tuple[Any, ...] = (MyDDP, MyZeRO1, MyLinears)
WRONG: dict[Any, str] = {
    NoBroadcast: "no broadcast at the start",
    BroadcastOfWeightsOnly: "no broadcast at the start of '0.bias', '2.bias'",
    SumForMean: "a sum where the mean is wanted",
    LostHook: "'2.bias' are never reduced: a hook",
    NotWaitedFor: "nobody waits",
    ReducedTwice: "all parameters is reduced twice",
    DividedTwice: "divided by the number of ranks twice",
    OnlyRankZero: "only rank 0 gets the result",
    GathersAllGradients: "bytes wasted: every rank gets all gradients",
    DividesByTwo: "a number of ranks is written in the code",
    EndsTooEarly: "off-by-one part: 2 of 2 elements belong to nobody",
    PartsOverlap: "belong to two ranks",
    PartOfRankZero: "all ranks have the same part",
    SumOfShards: "a sum where the mean is wanted",
    AllReduceThenCut: "bytes wasted. All-reduce of everything",
    NeverReduced: "cut, and never reduced",
    FirstPartEverywhere: "a wrong part: rank 1 gets that of rank 0",
    StaleWeights: "stale weights: the parts of the other ranks are never gathered",
    ReturnsTheWeights: "gather() returns a new tensor",
    GathersByAllReduce: "bytes wasted. Every rank sends more than its part",
    ColumnWithoutBackward: "does not sum the gradient of its input",
    RowWithoutSum: "this rank's part of the sum",
    BiasOnEveryRank: "row() adds the bias on every rank",
    MeanOfOutputs: "averages over the ranks",
    RowSumsBothWays: "the backward pass of row() sums too",
    ColumnSumsForward: "column() sums over the ranks in the forward pass",
    FeaturesOffByOne: "off-by-one part",
    CutGraph: "cuts the graph",
    GathersOutputs: "column() gathers its output",
    SumsTheInputToo: "bytes wasted: column needs no collective in the forward pass",
}
WRONG_SCHEDULES: dict[Callable[..., Any], str] = {
    last_backward_is_missing: "rank 0 has no backward of micro-batch 3",
    backward_twice: "rank 0 has two backwards of micro-batch 0",
    backward_before_forward: "backward of micro-batch 0 before its forward",
    warm_up_of_the_wrong_ranks: "an earlier rank needs more",
    stage_zero_everywhere: "rank 1 has an operation of stage 0",
    keeps_everything: "all forwards come before the first backward",
    one_at_a_time: "the warm-up is too short: rank 0 does 1 forward",
    fails_for_a_short_batch: "The last batch may have fewer micro-batches than ranks",
    counts_from_one: "rank 0 has a forward of micro-batch 4",
    forgets_to_return: "does it end with `return ops`",
}
