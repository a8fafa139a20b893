"""Backward through one stage of a pipeline: at once, or the gradient of its input first and those of its weights later.

The split works on the autograd graph as it is, whatever modules made it. The *spine* are the nodes that lead to the
stage's input. A parameter hangs on the spine at the node that uses it (a linear's matrix product): the first pass
runs along the spine and keeps what arrives at these nodes, the second starts there and runs only the part that leads
to the parameter. Nothing is computed twice: a parameter that hangs on several nodes, one of which leads to another,
and one at a Python autograd.Function, which computes all its gradients in one call, get theirs in the first pass.

Gradients are accumulated by autograd itself, with its hooks, as in an ordinary backward pass. The idea is that of Qi et
al. 2023, arXiv 2401.10241, appendix on implementation; torch.distributed.pipelining has another version of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from nbkit.rank.torch_private import unsafe_view


def enter(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a stage computes with, from detached tensors. Those that require a gradient are leaves and get it there.

    What comes out may be changed in place, as a block may do with what another one returned: a view of a leaf may not,
    and this one autograd does not know as a view. The leaf itself is read no more.
    """
    if not torch.is_grad_enabled():
        return tuple(received)
    return tuple(_alias(tensor, tensor.shape) if tensor.requires_grad else tensor for tensor in received)


_alias = unsafe_view


def backward(outputs: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """The ordinary backward pass: gradients of parameters and of the stage's input are added to their `.grad`."""
    if outputs:
        torch.autograd.backward(list(outputs), list(grads))


@dataclass
class _Point:
    """A node of the spine on which parameters hang, and what arrived there."""

    node: Node
    params: list[Tensor] = field(default_factory=list)
    grads: tuple[Tensor | None, ...] = ()


class Deferred:
    """The gradients of weights that `backward_input` left out."""

    def __init__(self, points: list[_Point]) -> None:
        self._points = points

    def run(self) -> None:
        """Add them to `.grad` of the parameters. Once; afterwards the graph of the stage is free."""
        points, self._points = self._points, []
        for point in reversed(points):
            there = [(GradientEdge(point.node, i), grad) for i, grad in enumerate(point.grads) if grad is not None]
            if there:
                edges, grads = zip(*there, strict=True)
                torch.autograd.backward(list(edges), list(grads), inputs=point.params)


def backward_input(outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Deferred:
    """The gradients of `inputs`, added to their `.grad`; what it returns computes those of the parameters.

    outputs, grads: where the stage ends, and the gradient there. inputs: the leaves that `enter` was given. A stage
    without such leaves (the first) runs back to the parameter that it used first.
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
    """The graph behind `roots`: who uses each node, the leaf tensors, and whether it can only be run in one pass."""
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
            one_pass = True  # the reentrant kind refuses to compute the gradients of some tensors only
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
    """(where on the spine parameters hang, the parameters that have to be done in the first pass)."""
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
    """The one node of the spine on which `leaf` hangs; None when there are several, or one of the `loose` outputs."""
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
