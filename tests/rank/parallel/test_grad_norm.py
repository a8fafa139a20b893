"""Test that the norm of all gradients counts each element once, and clipping scales them equally on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from nbkit.mesh import Mesh
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.grad_norm import clip, grad_norm
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.tensor_layout import Layout

SHAPES = {"even": (8, 3), "uneven": (5, 2), "few": (1, 4), "scalar": (), "never": (3,)}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = torch.bfloat16 if name == "even" else torch.float32
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


def gradient(name: str) -> torch.Tensor:
    # Whole numbers, so that bfloat16 holds them.
    return torch.randint(-9, 9, SHAPES[name], generator=torch.Generator().manual_seed(len(name))).float()


def norms(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shard in (4, 2, 1):
        axes = Axes.of(Mesh(dp=4), world.place.rank, shard=shard)
        layouts = {name: Layout.whole(shape) for name, shape in SHAPES.items()}
        axis = data_axis(skeleton_of(Bag()), layouts, axes, zero=3)
        for name, p in axis.held.items():
            if name != "never":
                rows = slice(None) if not p.dim() else slice(*_range(axis.layouts[name]))
                whole = gradient(name)
                p.grad = (whole[rows] if p.dim() else whole).to(p.dtype).clone()
        replication = {name: 4 if not shape else 4 // shard for name, shape in SHAPES.items()}
        heard: list[Any] = []
        delegating_group.listeners.append(lambda *told, heard=heard: heard.append(told))
        norm = grad_norm(axis.held, replication, device=torch.device("cpu"))
        delegating_group.listeners.clear()
        clip(axis.held, 2.0, norm)
        after = grad_norm(axis.held, replication, device=torch.device("cpu"))
        clip(axis.held, 100.0, after)
        same = grad_norm(axis.held, replication, device=torch.device("cpu"))
        found[str(shard)] = (norm, after, same, [op for op, *_ in heard], [nbytes for *_, nbytes in heard])
    return found


def _range(layout: Layout) -> tuple[int, int]:
    if not layout.pieces:
        return 0, 0
    _, there = layout.pieces[0]
    return there.start[0], there.start[0] + there.shape[0]


def test_each_element_counts_once_and_only_one_number_is_sent() -> None:
    everything = torch.cat([gradient(name).flatten() for name in SHAPES if name != "never"]).double()
    for found in run_ranks(norms, 4):
        for norm, after, same, operations, nbytes in found.values():
            assert norm.dtype == torch.float64 and norm.dim() == 0
            assert float(norm) == pytest.approx(float(everything.norm()), rel=1e-6)
            # Scaling rounds bfloat16 gradients.
            assert float(after) == pytest.approx(2.0, rel=2e-3)
            assert float(same) == float(after)
            assert (operations, nbytes) == (["all_reduce"], [8])


def alone(world: Any) -> float:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([3.0, 4.0])
    return float(grad_norm({"p": p}, {}, device=torch.device("cpu")))


def test_one_rank_has_the_plain_norm() -> None:
    assert run_ranks(alone, 1) == [5.0]


def test_without_gradients_the_norm_is_zero_and_nothing_is_scaled() -> None:
    p = nn.Parameter(torch.ones(2))
    norm = grad_norm({"p": p}, {}, device=torch.device("cpu"), world_size=1)
    clip({"p": p}, 1.0, norm)

    assert float(norm) == 0 and p.grad is None


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_many_elements_has_the_norm_of_float64(dtype: torch.dtype) -> None:
    # Sequential sums in float32 would give a norm that is 0.2 % off.
    p = nn.Parameter(torch.empty(5000, 8000, dtype=dtype))
    p.grad = torch.empty_like(p).normal_(generator=torch.Generator().manual_seed(0)).detach()
    norm = grad_norm({"p": p}, {}, device=torch.device("cpu"), world_size=1)

    assert float(norm) == pytest.approx(float(p.grad.double().norm()), rel=1e-5)
