"""Test that the simulated link of benchmarks counts the bytes that each operation sends from a rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks

from bench.rigs.slept_link import Rate, SleptLink

BYTES = 1200  # three ranks get equal parts


def _carried(world: object) -> dict[str, float]:
    link, rank, ranks = SleptLink(), dist.get_rank(), dist.get_world_size()
    flat, part = torch.ones(BYTES // 4), torch.ones(BYTES // 4 // ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    to, of = ([BYTES // 4 * (one == other) for one in range(ranks)] for other in (after, before))
    operations = {
        "all_reduce": lambda: dist.all_reduce(flat),
        "all_gather": lambda: dist.all_gather_into_tensor(flat, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, flat),
        "all_to_all": lambda: dist.all_to_all_single(flat.clone(), flat),
        "all_to_all to one": lambda: dist.all_to_all_single(flat.clone(), flat, of, to),
        "send": lambda: [work.wait() for work in (dist.isend(flat, after), dist.irecv(flat.clone(), before))],
    }
    found = {}
    for name, act in operations.items():
        link.rate, link.carried = Rate(0.0, 1e12), 0.0
        act()
        link.rate = None
        found[name] = link.carried
    return found


def test_the_link_counts_the_bytes_a_rank_sends_in_every_operation() -> None:
    third = BYTES / 3
    assert run_ranks(_carried, 3)[1] == {
        "all_reduce": 4 * third,
        "all_gather": 2 * third,
        "reduce_scatter": 2 * third,
        "all_to_all": 2 * third,
        "all_to_all to one": BYTES,
        "send": BYTES,
    }
