"""Pipeline parallelism: run this rank's part of a schedule.

A stage is a function from tensors to tensors. The last stage returns the loss. The executor follows this rank's list of
operations: it receives, computes, runs backward (whole, or split into I and W) and sends. p2p.py describes the
messages: activations and their gradients, per micro-batch and boundary between ranks, on the pp axis. Two neighbouring
stages on one rank, as in the middle of a V, pass tensors without a copy. Memory is freed as early as possible: a
stage's output when it has arrived, and tensors saved for backward after B or W.

The end of a step. No rank updates its weights before every rank has all its gradients. A stage exists on one rank only.
If one rank were updated and another aborted, no consistent step would exist. The last stage finishes long before the
first, and the step waits for the last rank. An all-reduce would also wait for the answers to its messages, which takes
1 to 2 ms on gloo. A dissemination barrier (Hensgen, Finkel and Manber 1988) posts its receives before the last backward
pass. So the messages for which a rank waits have already arrived. They are empty.

If the number of ranks is a power of two, the messages can go both ways between pairs and carry a sum of a few numbers
(recursive doubling). Then a step whose ranks are all in one pipeline needs no separate all-reduce for them. On two
ranks this takes a quarter of the CPU time of both: 0.1 ms per rank instead of 0.4.

The split backward. A stage's backward runs at once, or first for the gradient of its input and later for the gradients
of its weights. The split works on the existing autograd graph, whatever modules created it. The *spine* is the set of
nodes that lead to the stage's input. A parameter is attached to the spine at the node that uses it (for example the
matrix product of a linear layer). The first pass runs along the spine and stores the gradients that arrive at these
nodes. The second pass starts there and runs only the part that leads to the parameter. Nothing is computed twice. Two
kinds of parameters get their gradients in the first pass: a parameter that is attached to several nodes, one of which
leads to another, and a parameter at a Python autograd.Function, which computes all its gradients in one call.

Autograd itself accumulates the gradients, with its hooks, as in an ordinary backward pass. The idea is from Qi et al.
2023, arXiv 2401.10241, appendix on implementation. torch.distributed.pipelining has another version of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from nbkit.errors import TrainingError
from nbkit.rank.parallel.pipeline.p2p import Channels, Routes, StageMessage
from nbkit.rank.torch_private import unsafe_view
from nbkit.schedules import Op, Schedule
from nbkit.schedules.simulate import token_rounds


class Barrier:
    """A barrier of the ranks of `group`.

    Each step calls `open`, then `meet`. All ranks make the same number of calls, with equal arguments except `numbers`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()
        self._awaited: list[tuple[int, dist.Work, Tensor]] = []
        # Buffers of an aborted step. A peer may still write to them.
        self._left_over: list[tuple[int, dist.Work, Tensor]] = []

    @property
    def sums(self) -> bool:
        """Return True if the messages can carry numbers."""
        return self.size & (self.size - 1) == 0

    def open(self, tag: int, count: int = 0) -> None:
        """Post the receives.

        tag: a tag that no other running message uses. count: how many numbers `meet` sums, if `sums`. Without numbers,
        a rank notifies one peer and waits for another.
        """
        me, size = self.group.rank(), self.size
        self._left_over += self._awaited
        self._tag, self._awaited = tag, []
        distance = 1
        while distance < size:
            told, awaited = (me + distance) % size, (me - distance) % size
            if count:
                told = awaited = me ^ distance
            arriving = torch.empty(count, dtype=torch.float64)
            self._awaited.append((told, self.group.recv([arriving], awaited, tag), arriving))
            distance *= 2

    def meet(self, numbers: Tensor | None = None) -> None:
        """Wait until every rank has called this.

        numbers: float64 tensor of `count` elements. They become their sums over the ranks, bitwise equal on all ranks.
        """
        sent = []
        for peer, work, arrived in self._awaited:
            own = torch.empty(0, dtype=torch.float64) if numbers is None else numbers.clone()
            sent.append((self.group.send([own], peer, self._tag), own))
            work.wait()
            if numbers is not None:
                numbers += arrived
        for work, _ in sent:
            work.wait()
        self._awaited, self._left_over = [], []


def enter(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a stage's inputs, made from detached tensors.

    Tensors that require a gradient are leaves, and get it there. A block may change its input in place, as it may
    change the output of another block. Autograd forbids this for a view of a leaf, but it does not recognise these
    tensors as views. The leaf itself is not read again.
    """
    if not torch.is_grad_enabled():
        return tuple(received)
    return tuple(_alias(tensor, tensor.shape) if tensor.requires_grad else tensor for tensor in received)


_alias = unsafe_view


def backward(outputs: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run the ordinary backward pass. Gradients of parameters and of the stage's input are added to their `.grad`."""
    if outputs:
        torch.autograd.backward(list(outputs), list(grads))


@dataclass
class _Point:
    """A node of the spine to which parameters are attached, and the gradients that arrived there."""

    node: Node
    params: list[Tensor] = field(default_factory=list)
    grads: tuple[Tensor | None, ...] = ()


class Deferred:
    """The weight gradients that `backward_input` has not computed."""

    def __init__(self, points: list[_Point]) -> None:
        self._points = points

    def run(self) -> None:
        """Add the gradients to `.grad` of the parameters. Call it once, because it frees the graph of the stage."""
        points, self._points = self._points, []
        for point in reversed(points):
            there = [(GradientEdge(point.node, i), grad) for i, grad in enumerate(point.grads) if grad is not None]
            if there:
                edges, grads = zip(*there, strict=True)
                torch.autograd.backward(list(edges), list(grads), inputs=point.params)


def backward_input(outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Deferred:
    """Add the gradients of `inputs` to their `.grad`. Return the deferred gradients of the parameters.

    outputs, grads: the edges at the end of the stage, and the gradients there. inputs: the leaves that were passed to
    `enter`. A stage without such leaves (the first) runs back to the parameter that it used first.
    """
    if not outputs:
        return Deferred([])
    roots = [edge.node for edge in outputs]
    users, leaves, one_pass = _walk(roots)
    ends = {get_gradient_edge(tensor).node for tensor in inputs} & leaves.keys()
    if not ends:
        ends = {min(leaves, key=lambda leaf: min((_made_at(user) for user in users[leaf]), default=0))}
    points, early = ([], []) if one_pass else _hang(roots, users, leaves, ends)
    if not points:
        backward(outputs, grads)
        return Deferred([])
    handles = [point.node.register_prehook(_keep(point)) for point in points]
    try:
        wanted = [leaves[leaf] for leaf in ends] + early
        torch.autograd.backward(list(outputs), list(grads), inputs=wanted, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return Deferred(points)


def _keep(point: _Point) -> Callable[[Sequence[Tensor]], None]:
    def keep(grads: Sequence[Tensor]) -> None:
        point.grads = tuple(grads)

    return keep


def _walk(roots: Sequence[Node]) -> tuple[dict[Node, list[Node]], dict[Node, Tensor], bool]:
    """Return the graph of `roots`: the users of each node, the leaf tensors, True if only one pass is possible."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    leaves: dict[Node, Tensor] = {}
    one_pass = False
    todo = deque(users)
    while todo:
        node = todo.popleft()
        following = node.next_functions
        if not following and (variable := getattr(node, "variable", None)) is not None:
            leaves[node] = variable
        if isinstance(node, BackwardCFunction) and getattr(node, "_forward_cls", None) is CheckpointFunction:
            one_pass = True  # reentrant checkpointing refuses to compute only some of the gradients
        for other, _ in following:
            if other is None:
                continue
            if other not in users:
                users[other] = []
                todo.append(other)
            users[other].append(node)
    return users, leaves, one_pass


def _hang(
    roots: Sequence[Node], users: dict[Node, list[Node]], leaves: dict[Node, Tensor], ends: set[Node]
) -> tuple[list[_Point], list[Tensor]]:
    """Return (nodes of the spine with parameters, the parameters whose gradients the first pass must compute)."""
    spine = _leading_to(ends, users)
    loose = {root for root in roots if root not in spine}
    points: dict[Node, _Point] = {}
    early: list[Tensor] = []
    for leaf, tensor in leaves.items():
        if leaf in ends:
            continue
        where = _first_on(spine, loose, leaf, users)
        if where is None or isinstance(where, BackwardCFunction):
            early.append(tensor)
        else:
            points.setdefault(where, _Point(where)).params.append(tensor)
    return list(points.values()), early


def _leading_to(ends: set[Node], users: dict[Node, list[Node]]) -> set[Node]:
    found = set(ends)
    todo = list(ends)
    while todo:
        for user in users[todo.pop()]:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _first_on(spine: set[Node], loose: set[Node], leaf: Node, users: dict[Node, list[Node]]) -> Node | None:
    """Return the only node of the spine to which `leaf` is attached.

    Return None if there are several, or if it is attached to one of the `loose` outputs.
    """
    met: set[Node] = set()
    seen = {leaf}
    todo = [leaf]
    while todo:
        node = todo.pop()
        if node in loose:
            return None
        for user in users[node]:
            if user in spine:
                met.add(user)
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return met.pop() if len(met) == 1 else None


def _made_at(node: Node) -> int:
    return int(node._sequence_nr())  # type: ignore[attr-defined]


Forward = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""(stage, micro, output of the previous stage) -> input of the next stage. The last stage returns (loss, ...)."""

OnOp = Callable[[str, int, int], Callable[[], None]]
"""(kind, stage, micro) of an operation that begins after its waits -> a function to call when it is done."""

_AHEAD = 2  # receives are posted for this many operations after the current one


@dataclass
class _Kept:
    """A forward that waits for its backward: its input leaves, and the graph edges of its outputs.

    It does not keep the outputs themselves, because their memory is needed only until they are sent. live: numbers of
    the outputs with an edge. expected: numbers of the outputs for which a gradient arrives.
    """

    received: list[Tensor]
    edges: list[GradientEdge]
    live: list[int]
    expected: list[int]


class Pipeline:
    """A rank of a pipeline.

    group: the group of its pp axis, None for a single rank. rank: its position in the pipeline. ordered: a second group
    of the same ranks, for a backend that runs the operations of a group one after the other (NCCL). Then messages are
    sent through it, in one order. split: False makes I a whole backward and W an empty operation, in the order of the
    same schedule. This suits stages with activation checkpoints, which would otherwise be recomputed for the weights
    too. peers: the rank in `group` of each position in the pipeline; () if they are equal.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
        *,
        ordered: dist.ProcessGroup | None = None,
        split: bool = True,
        peers: Sequence[int] = (),
    ) -> None:
        self.schedule, self.rank, self.split = schedule, rank, split
        self._channels = Channels(group, device, ordered, peers)
        # With NCCL, the device's stream waits for the reduction of the loss before the update. This reduction is
        # launched after the last operation.
        self._barrier = Barrier(group) if group is not None and ordered is None else None
        self._lists: dict[tuple[int, bool, int | None], tuple[tuple[Op, ...], Routes, int]] = {}

    def begin_again(self) -> None:
        """Return to the initial state after a run that did not end on all ranks. Call it on every rank."""
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
        """Run every micro-batch through the pipeline. Return the detached outputs of the last stage; [] on other ranks.

        key: returns, for a micro-batch, a value that determines the shapes between stages, such as the shape of its
        input. It is equal on all ranks. training: also run backward, which adds to `.grad`. Otherwise run forward only,
        without gradients, and the last stage may return any tensors. rounds: as in nbkit.schedules.simulate, of
        num_micro / rounds sequences; `forward` brings the token from the last stage to the first. launch: called once,
        when all forwards of this rank are done and no other rank waits for it; if `meet` does nothing, at the end.
        numbers: how many numbers `meet` will sum, if it `sums_over` all ranks. An error in `forward` is raised here,
        and ends the run on this rank.
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
        """Return True if `meet` can sum numbers over `ranks` ranks. The pipeline must have exactly that many."""
        return self._barrier is not None and self._barrier.sums and self._barrier.size == ranks

    def meet(self, numbers: Tensor | None = None) -> None:
        """Wait until every rank of the pipeline calls this. Call it after a `run` with gradients, when all gradients
        are computed.

        numbers: see `run`; a float64 tensor whose elements become their sums. It does nothing with NCCL, or on a single
        rank.
        """
        if self._barrier is not None:
            self._barrier.meet(numbers)

    def _expect_all(self, last: StageMessage | None, numbers: int) -> None:
        """Post the receives of `meet`, after the receive of the last message.

        They are posted in the order in which all messages are sent. Telemetry uses this order to match both ends of a
        message.
        """
        if self._barrier is not None:
            if last is not None:
                self._channels.post(last)
            self._barrier.open(self._channels.tag_of_end, numbers)

    def _list(self, num_micro: int, training: bool, rounds: int | None) -> tuple[tuple[Op, ...], Routes, int]:
        """Return this rank's operations and messages, and the index of the operation after which `launch` is called.

        Without training, the lists contain only the forwards.
        """
        if (num_micro, training, rounds) not in self._lists:
            schedule = self.schedule
            if rounds is None:
                every = schedule.with_microbatches(num_micro).ops
                lists = [tuple(op for op in ops if training or op.kind == "F") for ops in every]
                sequences = None
            else:
                sequences = num_micro // rounds
                lists = list(token_rounds(schedule, sequences, rounds))
            routes = Routes.of(lists, self.rank, schedule.rank_of, schedule.num_stages, sequences)
            own = lists[self.rank]
            idle = _needed_by_none(own, routes) if self._barrier is not None else len(own) - 1
            self._lists[num_micro, training, rounds] = own, routes, idle
        return self._lists[num_micro, training, rounds]


def _needed_by_none(ops: Sequence[Op], routes: Routes) -> int:
    """Return the index of the operation after which this rank has no forward to run and nothing to send."""
    return max(i for i, op in enumerate(ops) if op.kind == "F" or routes.gives[i] is not None)


class _Run:
    """The state of one run on one rank."""

    def __init__(self, pipeline: Pipeline, routes: Routes, forward: Forward) -> None:
        self.channels, self.routes, self.call = pipeline._channels, routes, forward
        self.last, self.split = pipeline.schedule.num_stages - 1, pipeline.split
        self.handed: dict[StageMessage, list[Tensor]] = {}  # from one stage of this rank to the next
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
            arrived = self.handed.pop(StageMessage(kind != "F", stage, micro), [])
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
            self.handed[StageMessage(False, stage + 1, micro)] = [
                tensor.detach().requires_grad_(tensor.requires_grad) for tensor in produced
            ]
        elif kind != "W" and kind != "F" and stage:
            self.handed[StageMessage(True, stage - 1, micro)] = list(produced)

    def _forward(self, op: Op, received: list[Tensor]) -> Sequence[Tensor]:
        _, stage, micro = op
        outputs = self.call(stage, micro, enter(received))
        if not isinstance(outputs, tuple) or not all(isinstance(tensor, Tensor) for tensor in outputs):
            raise TrainingError(
                f"Stage {stage} must return a tuple of tensors.", numbers=f"got {type(outputs).__name__}"
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
                raise TrainingError("The loss does not depend on any parameter that requires a gradient.")
        elif kept.expected != kept.live:
            grads = [grad for number, grad in zip(kept.expected, grads, strict=True) if number in kept.live]
        if kind == "I" and self.split:
            self.deferred[stage, micro] = backward_input(kept.edges, grads, kept.received)
        else:
            backward(kept.edges, grads)
            if kind == "I":
                self.deferred[stage, micro] = Deferred([])
        # A tensor that the stage did not use has no gradient, but the previous stage waits for one.
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received]
