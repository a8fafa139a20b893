"""Buckets of gradients where what is split is also replicated: summed within a group of ranks, then across."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from nbkit.rank.parallel.data_parallel.buckets import Links, Packing, Reduction


def summed_after_a_break(world: Any) -> list[float]:
    rank = world.place.rank
    within = [dist.new_group(each) for each in ((0, 1), (2, 3))][rank // 2]
    across = [dist.new_group(each) for each in ((0, 2), (1, 3))][rank % 2]
    packing = Packing.of([(4,)], 2, torch.zeros(4))
    reduction = Reduction(packing, Links(within, 2, rank % 2, across, rank // 2), torch.zeros(4))
    reduction.send([torch.full((4,), 100.0)])
    reduction.cross()
    assert reduction._work is not None
    reduction._work.wait()  # and the step is broken off: nobody receives it
    reduction.send([torch.full((4,), rank + 1.0)])
    row, canary = reduction.receive()
    return [*row[:2].tolist(), float(canary)]


def test_a_bucket_that_was_broken_off_while_it_was_awaited_is_summed_across_the_next_time() -> None:
    assert run_ranks(summed_after_a_break, 4) == [[10.0, 10.0, 2.0]] * 4
