"""Test that the ranks of tests are forked with all imports done. An import in a rank would cost a second."""

from __future__ import annotations

import os
import sys

from ranks import run_ranks

BEFORE = frozenset(sys.modules)  # a rank imports this file before anything else


def imported(world: object) -> tuple[bool, bool, int]:
    modules = ("nbkit.rank.train.trainer", "pytest", "transformers")
    return "rank_preload" in BEFORE, BEFORE.issuperset(modules), len(os.listdir("/proc/self/task"))


def test_a_rank_starts_with_all_imports_done_and_one_thread() -> None:
    assert run_ranks(imported, 2, join=False) == [(True, True, 1)] * 2
