"""Compare a model that is split over a tensor axis with one process, without a job."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.mesh import Mesh
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.copies import homes, replace_submodule, skeleton_of
from nbkit.rank.parallel.tensor.apply import TensorSplit, tensor_parallel
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan
from nbkit.rank.parallel.tensor.proof.prove import prove
from verify.models.specimens import ZOO, Specimen


def axes_of(world: Any) -> Axes:
    return Axes.of(Mesh(tp=dist.get_world_size()), dist.get_rank())


def fill(part: nn.Module, whole: nn.Module, split: TensorSplit) -> None:
    """Give `part` its pieces of the weights of `whole`."""
    weights = dict(whole.named_parameters())
    for name, places in homes(part).items():
        layout = split.layouts[name]
        old = places[0][0]._parameters[places[0][1]]
        assert old is not None
        assert tuple(old.shape) == layout.local, name
        new = torch.empty(layout.local, dtype=weights[name].dtype)
        for here, there in layout.pieces:
            new[here.slices] = weights[name].detach()[there.slices]
        replace_submodule(places, nn.Parameter(new, requires_grad=old.requires_grad))


def whole_gradients(part: nn.Module, split: TensorSplit, group: dist.ProcessGroup) -> dict[str, Tensor | None]:
    """Return name -> gradient of the whole parameter. Pieces are joined, partial sums added; copies must be equal."""
    found: dict[str, Tensor | None] = {}
    for name, places in homes(part).items():
        param = places[0][0]._parameters[places[0][1]]
        assert param is not None
        layout = split.layouts[name]
        if param.grad is None:
            found[name] = None
            continue
        whole = torch.zeros(layout.shape, dtype=param.dtype)
        for here, there in layout.pieces:
            whole[there.slices] = param.grad[here.slices]
        if name in split.partial or not layout.is_whole:
            dist.all_reduce(whole, group=group)
        else:
            others = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(others, whole, group=group)
            assert all(torch.equal(other, whole) for other in others), f"{name} differs between the ranks"
        found[name] = whole
    return found


def proven(model: nn.Module, value: Any, said: Any = None) -> TensorPlan:
    """Return the plan of `model` for this world. Rank 0 finds it by running the model on `value`, as in a job."""
    size = dist.get_world_size()
    proof = [prove(model, lambda: call(model, value), [size], said) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(proof, src=0)
    return plan_of(model, size, said, proof[0])


def compared(
    world: Any,
    model: nn.Module,
    value: Any,
    loss: Any,
    *,
    plan: Any = None,
    sequence: bool = True,
    chunks: int = 1,
) -> tuple[float, float, TensorSplit, nn.Module]:
    """Return (largest difference of a gradient / largest gradient, difference of the losses, the split, this rank's
    part).

    plan: a plan of the model, or the user's roles.
    """
    whole = copy.deepcopy(model)
    truth = loss(call(whole, value))
    truth.backward()
    part = skeleton_of(model)
    axes = axes_of(world)
    made = plan if isinstance(plan, TensorPlan) else proven(model, value, plan)
    split = tensor_parallel(part, axes, plan=made, sequence=sequence, chunks=chunks)
    fill(part, model, split)
    ours = loss(call(part, value))
    ours.backward()
    group = axes.group("tp")
    assert group is not None
    found = whole_gradients(part, split, group)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    assert expected.keys() == found.keys()
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    worst = 0.0
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            worst = max(worst, float((found[name] - gradient).abs().max()) / scale)
            assert worst < 1e-10, (name, worst)
    return worst, abs(float(ours.detach() - truth.detach())), split, part


def shortened(value: Any, length: int) -> Any:
    """Return `value` with the first `length` positions of every tensor (B, T) in it."""
    if isinstance(value, Tensor):
        return value[:, :length]
    if isinstance(value, dict):
        return {key: shortened(part, length) for key, part in value.items()}
    return tuple(shortened(part, length) for part in value)


def specimen(
    world: Any, name: str, *, length: int | None = None, **options: Any
) -> tuple[float, float, TensorSplit, Any]:
    one: Specimen = ZOO[name]
    value, target = one.batch(3, dtype=torch.float64)
    if length is not None:
        value, target = shortened(value, length), target[:, :length] if target.ndim == 2 else target
    return compared(world, one.build(torch.float64), value, lambda out: one.loss(out, target), **options)
