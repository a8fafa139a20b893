"""A pipeline stage split over the tensor axis: each rank sends the next stage its own positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from verify.models.specimens import ZOO
from verify.tensor_split import axes_of, fill, shortened, whole_gradients


def staged(
    world: Any, name: str, sides: list[list[tuple[int, int]]], length: int = 16
) -> tuple[float, set[tuple[int, ...]]]:
    """Runs the stages of all sides one after the other: (largest difference / largest gradient, shapes between)."""
    spec = ZOO[name]
    model = spec.build(torch.float64)
    value, target = spec.batch(3, dtype=torch.float64)
    value, target = shortened(value, length), target[:, :length] if target.ndim == 2 else target
    _, expected = spec.gradients(copy.deepcopy(model), value, target)
    chain = find_chain(model, lambda: call(model, value))
    axes = axes_of(world)
    group = axes.group("tp")
    assert group is not None
    plan = plan_of(skeleton_of(model), group.size())
    made = []
    for ranges in sides:
        part = skeleton_of(model)
        stages = Staged(part, chain, ranges, team=group)
        split = tensor_parallel(part, axes, plan=plan)
        fill(part, model, split)
        made.append((part, stages, split))
    order = sorted((lo, side, i) for side, ranges in enumerate(sides) for i, (lo, _) in enumerate(ranges))
    tape: list[tuple[tuple[Tensor, ...], Any]] = []
    output: Any = ()
    for _, side, i in order:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        output = made[side][1].forward(i, value, received)
        tape.append((received, output))
    spec.loss(output, target).backward()
    for (_, sent), (received, _) in zip(reversed(tape[:-1]), reversed(tape[1:]), strict=True):
        crossed = [(a, b.grad) for a, b in zip(sent, received, strict=True) if b.grad is not None]
        torch.autograd.backward([a for a, _ in crossed], [grad for _, grad in crossed])
    found: dict[str, Tensor] = {}
    for part, _, split in made:
        for key, grad in whole_gradients(part, split, group).items():
            if grad is not None:
                found[key] = found[key] + grad if key in found else grad
    gradients = {key: grad for key, grad in expected.items() if grad is not None}
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    worst = max(float((found[key] - grad).abs().max()) for key, grad in gradients.items())
    return worst / scale, {tuple(t.shape) for received, _ in tape for t in received if t.requires_grad}


INTERLEAVED, FOLDED = [[(0, 1), (2, 3)], [(1, 2), (3, 4)]], [[(0, 1), (3, 4)], [(1, 2), (2, 3)]]
RUNS = [
    ("gpt_tied", INTERLEAVED, 16),
    ("encoder", FOLDED, 16),
    ("gpt2_padded", INTERLEAVED, 13),
    ("gpt_tied", FOLDED, 1),
]
ALSO = [("gpt2_padded", FOLDED, 16), ("llama", INTERLEAVED, 16)]


def every(world: Any, runs: list[Any]) -> list[tuple[float, set[tuple[int, ...]]]]:
    return [staged(world, *run) for run in runs]


@pytest.mark.parametrize("runs", [RUNS, pytest.param(ALSO, marks=pytest.mark.long)])
def test_stages(runs: list[Any]) -> None:
    for rank, found in enumerate(run_ranks(every, 2, runs, timeout=150)):
        assert all(worst <= 1e-12 for worst, _ in found)
        # What does not divide, and a single position, which goes whole.
        lengths = {16: 8, 13: [7, 6][rank], 1: 1}
        assert [shapes for _, shapes in found] == [{(3, lengths[length], 32)} for _, _, length in runs]
