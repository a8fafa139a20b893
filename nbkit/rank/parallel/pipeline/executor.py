"""Pipeline parallelism: this rank's part of a schedule, whatever the stages compute.

A stage is a function from tensors to tensors; the last one returns the loss. The executor follows this rank's list of
operations: it receives, computes, runs backward (whole, or split into I and W) and sends. What goes over the wire is
said in p2p.py: per micro-batch and boundary between ranks, the activations and their gradients, on the pp axis.
Two neighbouring stages on one rank, as in the middle of a V, hand their tensors over without a copy.

Freed as early as can be: a stage's output when it has arrived, what forward kept for backward after B or W.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nbkit.errors import TrainingError
from nbkit.rank.parallel.pipeline.p2p import Channels
from nbkit.rank.parallel.pipeline.p2p_groups import Edges
from nbkit.rank.parallel.pipeline.routing import Message, Routes
from nbkit.rank.parallel.pipeline.split_backward import Deferred, backward, backward_input, enter
from nbkit.rank.parallel.pipeline.step_barrier import Barrier
from nbkit.schedules import Op, Schedule
from nbkit.schedules.token_rounds import token_rounds

Forward = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""(stage, micro, what the stage before returned) -> what the next one gets; of the last stage: (loss, and any more)."""

OnOp = Callable[[str, int, int], Callable[[], None]]
"""(kind, stage, micro) of an operation that begins, its waits behind it -> what is called when it is done."""

_AHEAD = 2  # receives are posted for this many operations after the present one


@dataclass
class _Kept:
    """A forward that waits for its backward: the leaves it got, and where its outputs leave the graph.

    Not the outputs themselves, whose memory is needed no longer than sending takes. live: numbers of the outputs with
    an edge; expected: of those for which a gradient comes.
    """

    received: list[Tensor]
    edges: list[GradientEdge]
    live: list[int]
    expected: list[int]


class Pipeline:
    """A rank of a pipeline. group: of its pp axis, None when it is alone. rank: the place in it.

    edges: `edge_groups(...)`, which NCCL needs. split: False makes I a whole backward and W nothing, in the order of
    the same schedule; right for stages with activation checkpoints, which would be recomputed for each weight. peers:
    of each place along the pipeline, its rank in `group`; () for the same.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
        *,
        edges: Edges | None = None,
        split: bool = True,
        peers: Sequence[int] = (),
    ) -> None:
        self.schedule, self.rank, self.split = schedule, rank, split
        self._channels = Channels(group, device, edges, peers)
        # Only NCCL has edges: there the device's stream waits for the loss's reduction, launched after the last
        # operation, before it updates.
        self._barrier = Barrier(group) if group is not None and not edges else None
        self._lists: dict[tuple[int, bool, int | None], tuple[tuple[Op, ...], Routes, int]] = {}

    def begin_again(self) -> None:
        """As at the beginning, on every rank alike: after a run that did not end on all of them."""
        self._channels.begin_again()

    def run(
        self,
        num_micro: int,
        forward: Forward,
        key: Callable[[int], Hashable],
        *,
        training: bool = True,
        rounds: int | None = None,
        launch: Callable[[], None] | None = None,
        on_op: OnOp | None = None,
        numbers: int = 0,
    ) -> list[tuple[Tensor, ...]]:
        """Every micro-batch through the pipeline. Returns what the last stage returned, detached; [] on other ranks.

        key: for a micro-batch, what the shapes between stages depend on, such as the shape of its input; equal on all
        ranks. training: also backward, which adds to `.grad`; otherwise forward only, without gradients, and the last
        stage may return any tensors. rounds: as nbkit.schedules.token_rounds has them, of num_micro / rounds
        sequences, in which `forward` brings the token from the last stage to the first. launch: called once, when all
        forwards of this rank are done and no other rank waits for it any more; where `meet` does nothing, at the end.
        numbers: how many of them `meet` will sum, where it `sums_over` all ranks. What `forward` raises is raised here;
        the run is then over on this rank.
        """
        if num_micro == 0:
            return []
        ops, routes, idle = self._list(num_micro, training, rounds)
        run = _Run(self, routes, forward)
        self._channels.begin(routes, [(training, key(micro)) for micro in range(num_micro)])
        try:
            with torch.set_grad_enabled(training):
                for index, op in enumerate(ops):
                    if training and index == len(ops) - 1:
                        self._expect_all(routes.needs[index], numbers)
                    run.do(index, op, on_op)
                    if index == idle and launch is not None:
                        launch()
            self._channels.finish()
        except BaseException:
            self._channels.abandon()
            raise
        return [run.results[micro] for micro in sorted(run.results)]

    def sums_over(self, ranks: int) -> bool:
        """Whether `meet` can sum numbers over `ranks` ranks: as many as the pipeline has, where they meet."""
        return self._barrier is not None and self._barrier.sums and self._barrier.size == ranks

    def meet(self, numbers: Tensor | None = None) -> None:
        """After a `run` with gradients, and what else makes them: wait until every rank of the pipeline is here.

        numbers: see `run`; float64, which become their sums. Nothing on NCCL, nor for a rank that is alone.
        """
        if self._barrier is not None:
            self._barrier.meet(numbers)

    def _expect_all(self, last: Message | None, numbers: int) -> None:
        """Post the receives of `meet`, behind that of the last message: they come in the order in which all are sent,
        by which telemetry knows both ends of one."""
        if self._barrier is not None:
            if last is not None:
                self._channels.post(last)
            self._barrier.open(self._channels.tag_of_end, numbers)

    def _list(self, num_micro: int, training: bool, rounds: int | None) -> tuple[tuple[Op, ...], Routes, int]:
        """This rank's operations and messages, and the place after which `launch` is called; without training, the
        forwards of the same lists."""
        if (num_micro, training, rounds) not in self._lists:
            schedule = self.schedule
            if rounds is None:
                every = schedule.with_microbatches(num_micro).ops
                lists = [tuple(op for op in ops if training or op.kind == "F") for ops in every]
            else:
                lists = list(token_rounds(schedule, num_micro // rounds, rounds))
            routes = Routes.of(lists, self.rank, schedule.rank_of, schedule.num_stages)
            own = lists[self.rank]
            idle = _needed_by_none(own, routes) if self._barrier is not None else len(own) - 1
            self._lists[num_micro, training, rounds] = own, routes, idle
        return self._lists[num_micro, training, rounds]


def _needed_by_none(ops: Sequence[Op], routes: Routes) -> int:
    """The place after which this rank has no forward to do, and nothing to send."""
    return max(i for i, op in enumerate(ops) if op.kind == "F" or routes.gives[i] is not None)


class _Run:
    """What is under way in one run on one rank."""

    def __init__(self, pipeline: Pipeline, routes: Routes, forward: Forward) -> None:
        self.channels, self.routes, self.call = pipeline._channels, routes, forward
        self.last, self.split = pipeline.schedule.num_stages - 1, pipeline.split
        self.handed: dict[Message, list[Tensor]] = {}  # from one stage of this rank to the next
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.deferred: dict[tuple[int, int], Deferred] = {}
        self.results: dict[int, tuple[Tensor, ...]] = {}

    def do(self, index: int, op: Op, on_op: OnOp | None) -> None:
        for need in self.routes.needs[index : index + 1 + _AHEAD]:
            if need is not None:
                self.channels.post(need)
        kind, stage, micro = op
        need = self.routes.needs[index]
        arrived: list[Tensor] = []
        if need is not None:
            arrived = self.channels.receive(need)
        elif kind != "W":
            arrived = self.handed.pop(Message(kind != "F", stage, micro), [])
        work = partial(self._forward if kind == "F" else self._backward, op, arrived)
        if on_op is None:
            produced = work()
        else:
            done = on_op(kind, stage, micro)
            produced = work()
            done()
        give = self.routes.gives[index]
        if give is not None:
            expected = self.channels.send(give, produced)
            if kind == "F" and (kept := self.kept.get((stage, micro))) is not None:
                kept.expected = expected
        elif kind == "F" and stage < self.last:
            self.handed[Message(False, stage + 1, micro)] = [
                tensor.detach().requires_grad_(tensor.requires_grad) for tensor in produced
            ]
        elif kind != "W" and kind != "F" and stage:
            self.handed[Message(True, stage - 1, micro)] = list(produced)

    def _forward(self, op: Op, received: list[Tensor]) -> Sequence[Tensor]:
        _, stage, micro = op
        outputs = self.call(stage, micro, enter(received))
        if not isinstance(outputs, tuple) or not all(isinstance(tensor, Tensor) for tensor in outputs):
            raise TrainingError(
                f"Stage {stage} has to return a tuple of tensors.", numbers=f"got {type(outputs).__name__}"
            )
        if stage == self.last:
            self.results[micro] = tuple(tensor.detach() for tensor in outputs)
        if torch.is_grad_enabled():
            ends = outputs[:1] if stage == self.last else outputs
            live = [number for number, tensor in enumerate(ends) if tensor.requires_grad]
            edges = [get_gradient_edge(ends[number]) for number in live]
            self.kept[stage, micro] = _Kept([x for x in received if x.requires_grad], edges, live, live)
        return outputs

    def _backward(self, op: Op, grads: list[Tensor]) -> Sequence[Tensor]:
        kind, stage, micro = op
        if kind == "W":
            self.deferred.pop((stage, micro)).run()
            return ()
        kept = self.kept.pop((stage, micro))
        if stage == self.last:
            grads = [torch.ones_like(self.results[micro][0])]
            if not kept.edges:
                raise TrainingError("The loss does not depend on any parameter that is trained.")
        elif kept.expected != kept.live:
            grads = [grad for number, grad in zip(kept.expected, grads, strict=True) if number in kept.live]
        if kind == "I" and self.split:
            self.deferred[stage, micro] = backward_input(kept.edges, grads, kept.received)
        else:
            backward(kept.edges, grads)
            if kind == "I":
                self.deferred[stage, micro] = Deferred([])
        # A tensor that the stage did not use has no gradient; the stage before waits for one.
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received]
