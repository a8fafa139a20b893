"""An all-reduce in two levels gives the sums of one process, and sends between nodes what the formula says.

The nodes are numbers that are given: two ranks on each of two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from nbkit.mesh import Mesh
from nbkit.node_levels import Levels, levels_of
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel.buckets import TwoLevelSum, all_reduce
from nbkit.rank.parallel.device_mesh import Axes

NODES = (0, 0, 1, 1)
NUM = 1003  # elements: no number of ranks divides them


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
def test_the_levels_of_a_group(group: Any, node_of: Any, levels: Levels | None) -> None:
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
    first.advance()  # each may be at another level
    second.wait()
    first.wait()
    far = [float((flat - n * sum(everyone))[:-1].abs().max()) for n, flat in enumerate(flats, 1)]
    again = flats[0].clone()
    again[-1] = float(rank < 2)
    broken = TwoLevelSum(again, -1, levels)
    broken.advance()
    if rank == 1:  # as where an aborted operation has left what was there
        broken._within.zero_()
    broken.wait()
    return {"far": far, "canary": [float(flat[-1]) for flat in flats], "broken": float(again[-1]), "sent": sent}


def test_sums_are_those_of_one_level_and_a_part_that_was_broken_off_shows_on_its_whole_node() -> None:
    said = run_ranks(summed, 4)
    assert all(max(one["far"]) < 1e-12 and one["canary"] == [2.0, 2.0] for one in said)
    assert [one["broken"] for one in said] == [0.0, 0.0, 2.0, 2.0]
    for one in said:
        between = [size for op, group, size in one["sent"] if op == "all_reduce" and "between nodes" in group]
        assert len(between) == 3 and all(NUM / 2 * 8 <= size < NUM / 2 * 8 + 2 * 128 for size in between)
        assert not any(op == "all_reduce" and "between nodes" not in group for op, group, _ in one["sent"])
