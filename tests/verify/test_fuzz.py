"""Test that models with random operations in attentions and MLPs equal one process when tp splits them.

This is a sample; `make fuzz-tp` runs 500 seeds.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks

from verify import fuzz

SEEDS = list(range(500, 503))


@pytest.mark.timeout(200)
def test_random_blocks_equal_one_process_and_most_are_split() -> None:
    for found in run_ranks(fuzz.tried, 2, SEEDS, timeout=180):
        assert {seed: why for seed, (why, _, _) in found.items() if why} == {}, fuzz.told(found)
        by_hand = sum(possible for _, _, possible in found.values())
        assert sum(min(split, possible) for _, split, possible in found.values()) >= 0.9 * by_hand, fuzz.told(found)
