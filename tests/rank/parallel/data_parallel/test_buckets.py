"""Test that buckets of gradients have all of each tensor, and their sums are right: within groups of ranks, across
groups, and over nodes in two levels.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from nbkit.mesh import Levels, Mesh, levels_of
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel import buckets, zero1_2
from nbkit.rank.parallel.data_parallel.buckets import (
    InFlight,
    Links,
    Packing,
    Reduction,
    TwoLevelSum,
    all_reduce,
    flat_with_views,
)
from nbkit.rank.parallel.device_mesh import Axes

BLOCK = [(320,), (960, 320), (960,), (320, 320), (320,), (320,), (1280, 320), (1280,), (320, 1280), (320,)]
ODD = [(8, 3), (7,), (), (12, 5), (4,), (0, 3), (12, 64, 70), (5, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_packed_tensors_are_in_each_ranks_shard_and_unpack_unchanged(ranks: int) -> None:
    packing = Packing.of(ODD, ranks, torch.empty(0))
    tensors = [torch.randn(shape) for shape in ODD]
    matrix = torch.full((ranks, packing.width), 9.0)
    packing.pack(matrix, tensors)
    flats = [torch.zeros(tensor.numel()) for tensor in tensors]
    packing.unpack(matrix, flats)

    for i, tensor in enumerate(tensors):
        for rank in range(ranks):
            mine = tensor[packing.rows(i, rank)] if tensor.ndim else tensor
            assert torch.equal(packing.shard(matrix[rank], i, rank), mine)
        assert torch.equal(flats[i], tensor.flatten())
    packing.pack(matrix, [None] * len(tensors))
    assert not any(packing.shard(matrix[0], i, 0).any() for i in range(len(tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_and_large_tensors_align_to_128_bytes_with_under_1_percent_padding(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(buckets, "reduce_scatter", lambda row, matrix, **_: sent.append(matrix))
    like = torch.empty(0, dtype=dtype)
    for shapes in (BLOCK, ODD):
        packing = Packing.of(shapes, ranks, like)
        links = Links(group=None, ranks=ranks, index=0, across=None, replica=0)
        Reduction(packing, links, like).send([torch.ones(shape, dtype=dtype) for shape in shapes])
        row = sent[-1].nbytes // ranks
        starts = [start * dtype.itemsize for start in packing.starts]
        large = [width * dtype.itemsize >= 12800 for width in packing.widths]
        whole, views = flat_with_views(shapes, like)

        assert row % 128 == 0
        assert all(start % (128 if is_large else 16) == 0 for start, is_large in zip(starts, large, strict=True))
        assert all((view.data_ptr() - whole.data_ptr()) % 128 == 0 for view in views if view.numel())
        assert [view.numel() for view in views] == [prod(shape) for shape in shapes]
        if shapes is BLOCK:
            assert any(large) and ranks * row <= 1.01 * dtype.itemsize * sum(map(prod, shapes))


def test_a_gradient_of_one_backward_goes_directly_into_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(buckets, "reduce_scatter", lambda row, matrix, **_: sent.append(matrix))
    links = Links(group=None, ranks=2, index=0, across=None, replica=0)
    wholes = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(6))]
    bucket = zero1_2.ShardBucket(
        wholes, [nn.Parameter(p[: len(p) // 2]) for p in wholes], links, InFlight(), buffer=True
    )
    for p in wholes:
        p.grad = torch.ones_like(p)
    bucket.send()
    assert not any(view.any() for view in bucket.views)
    assert all(
        bucket.packing.shard(row, i, rank).all() for rank, row in enumerate(sent[0].view(2, -1)) for i in range(2)
    )
    assert all(p.grad is None for p in wholes)


def summed_after_a_break(world: Any) -> list[float]:
    rank = world.place.rank
    within = [dist.new_group(each) for each in ((0, 1), (2, 3))][rank // 2]
    across = [dist.new_group(each) for each in ((0, 2), (1, 3))][rank % 2]
    packing = Packing.of([(4,)], 2, torch.zeros(4))
    reduction = Reduction(packing, Links(within, 2, rank % 2, across, rank // 2), torch.zeros(4))
    reduction.send([torch.full((4,), 100.0)])
    reduction.cross()
    assert reduction._work is not None
    reduction._work.wait()  # then the step is interrupted, so its result is not received
    reduction.send([torch.full((4,), rank + 1.0)])
    row, canary = reduction.receive()
    return [*row[:2].tolist(), float(canary)]


def test_a_bucket_after_an_interrupted_step_is_summed_right_in_the_next_step() -> None:
    assert run_ranks(summed_after_a_break, 4) == [[10.0, 10.0, 2.0]] * 4


NODES = (0, 0, 1, 1)
NUM = 1003  # elements; no tested number of ranks divides it


@pytest.mark.parametrize(
    ("group", "node_of", "levels"),
    [
        ((0, 1, 2, 3), NODES, Levels(((0, 1), (2, 3)), ((0, 2), (1, 3)))),
        ((0, 1, 2, 3), (0, 1, 0, 1), Levels(((0, 2), (1, 3)), ((0, 1), (2, 3)))),  # numbered across nodes
        ((0, 1, 2, 3, 4, 5), (0, 0, 0, 0, 1, 1), Levels(((0, 1), (2, 3), (4, 5)), ((0, 2, 4), (1, 3, 5)))),
        ((0, 1), NODES, None),  # one node
        ((0, 2), NODES, None),  # one rank on each
        ((0, 1, 2), NODES, None),  # no size divides 2 and 1
        ((0, 1, 2, 3), (), None),
    ],
)
def test_levels_of_a_group_follow_the_nodes_of_its_ranks(group: Any, node_of: Any, levels: Levels | None) -> None:
    assert levels_of(group, node_of) == levels


def summed(world: Any) -> dict[str, Any]:
    rank = world.place.rank
    axes = Axes.of(Mesh(dp=4), rank, summed="dp", node_of=NODES)
    levels = axes.levels("dp")
    assert levels is not None
    sent: list[tuple[str, str, int]] = []
    delegating_group.listeners.append(lambda op, group, num_bytes: sent.append((op, group, num_bytes)))
    everyone = [torch.randn(NUM, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    flats = [one.clone() for one in (everyone[rank], everyone[rank] * 2)]
    for flat in flats:
        flat[-1] = float(rank < 2)  # the canary
    first, second = (all_reduce(flat, -1, axes.group("dp"), levels) for flat in flats)
    assert isinstance(first, TwoLevelSum) and isinstance(second, TwoLevelSum)
    first.advance()  # the two sums may be at different levels
    second.wait()
    first.wait()
    far = [float((flat - n * sum(everyone))[:-1].abs().max()) for n, flat in enumerate(flats, 1)]
    again = flats[0].clone()
    again[-1] = float(rank < 2)
    broken = TwoLevelSum(again, -1, levels)
    broken.advance()
    if rank == 1:  # as if an aborted operation had left old values
        broken._within.zero_()
    broken.wait()
    return {"far": far, "canary": [float(flat[-1]) for flat in flats], "broken": float(again[-1]), "sent": sent}


def test_two_level_sums_are_right_and_an_aborted_part_shows_on_its_whole_node() -> None:
    said = run_ranks(summed, 4)
    assert all(max(one["far"]) < 1e-12 and one["canary"] == [2.0, 2.0] for one in said)
    assert [one["broken"] for one in said] == [0.0, 0.0, 2.0, 2.0]
    for one in said:
        between = [size for op, group, size in one["sent"] if op == "all_reduce" and "between nodes" in group]
        assert len(between) == 3 and all(NUM / 2 * 8 <= size < NUM / 2 * 8 + 2 * 128 for size in between)
        assert not any(op == "all_reduce" and "between nodes" not in group for op, group, _ in one["sent"])
