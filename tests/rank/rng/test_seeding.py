"""Seeding is a small part of a step, and repeats what it gave."""

from __future__ import annotations

import torch

from nbkit.rank.rng.seeding import seed_step


def test_a_step_is_seeded_alike_again_and_devices_not_in_use_are_left_alone() -> None:
    """torch.manual_seed would queue a call, with a traceback, for each of them."""
    queued = torch.cuda._lazy_seed_tracker.get_calls()
    drawn = []
    for rank in (0, 1, 0):
        seed_step(7, 3, rank)
        drawn.append(float(torch.rand(())))

    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.cuda._lazy_seed_tracker.get_calls() is queued
