"""Run the fast part of `make gpu-check`: a training on a pretended GPU equals one process, after errors too.

`make gpu-check` also has other strategies, schedules, pairs of strategies and features, deaths noticed at once, four
ranks, llama and convolutions.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from gpu_check import check_deaths, check_errors, check_steps, check_switches, every_pair
from gpu_features import check_features

pytestmark = pytest.mark.usefixtures("rows_are_known")


@pytest.mark.long
def test_switches_keep_the_training() -> None:
    assert list(check_switches(("zero3", "pp"), ranks=2)) == ["2 switches: equal"]


@pytest.mark.long
def test_a_training_continues_after_an_error_on_one_rank() -> None:
    assert list(check_errors(("ddp",), ranks=2)) == ["an error under ddp: equal"]


def test_the_host_never_waits_in_a_steady_step_and_copies_the_batch_once() -> None:
    strategies = ("zero1", "zero3", "pp microbatches=4")

    assert list(check_steps(strategies, ranks=2, together=True)) == [
        f"a steady step under {name}: equal" for name in strategies
    ]


def test_every_pair_returns_a_walk_over_each_pair_once() -> None:
    walk = every_pair("abcd")

    assert sorted(pairwise(walk)) == [(a, b) for a in "abcd" for b in "abcd" if a != b]


@pytest.mark.long  # the next test covers the same, and also torn weights of other ranks
def test_a_dead_rank_is_replaced_from_a_backup_in_host_memory() -> None:
    assert list(check_deaths(("zero3",), ranks=2, late=[0.0])) == ["a death under zero3: equal"]


def test_a_death_that_tears_the_weights_of_the_other_ranks_is_undone_under_ddp() -> None:
    # The other ranks' hosts have enqueued the update after a reduction that the dead rank never joins.
    assert list(check_deaths(("ddp",), ranks=2, late=[3.0])) == ["a death under ddp, heard of late: equal"]


@pytest.mark.long
def test_features_train_on_a_pretended_gpu_as_in_one_process() -> None:
    assert list(check_features(("zero3",), ("fp16",), ranks=2)) == ["fp16 under zero3: equal"]
