"""The ranks of these tests are forked with everything imported; a rank that imports it again costs a second."""

from __future__ import annotations

import os
import sys

from ranks import run_ranks

BEFORE = frozenset(sys.modules)  # in a rank: when this file is imported, which is before anything else


def imported(world: object) -> tuple[bool, bool, int]:
    modules = ("nbkit.rank.train.trainer", "pytest", "transformers")
    return "rank_preload" in BEFORE, BEFORE.issuperset(modules), len(os.listdir("/proc/self/task"))


def test_a_rank_starts_with_everything_imported_and_no_thread_but_its_own() -> None:
    assert run_ranks(imported, 2, join=False) == [(True, True, 1)] * 2
