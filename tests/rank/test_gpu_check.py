"""The fast part of `make gpu-check`: on a pretended GPU a training is as on one process, after switches and errors too.

Left to it are the other strategies, schedules and pairs of strategies, four ranks, llama and convolutions.
"""

from __future__ import annotations

from itertools import pairwise

from gpu_check import check_errors, check_switches, every_pair


def test_switches_keep_the_training() -> None:
    assert list(check_switches(("zero3", "pp", "tp"), ranks=2)) == ["6 switches: equal"]


def test_an_error_on_one_rank_leaves_a_training_that_goes_on() -> None:
    assert list(check_errors(("ddp",), ranks=2)) == ["an error under ddp: equal"]


def test_a_walk_takes_every_pair_once() -> None:
    walk = every_pair("abcd")

    assert sorted(pairwise(walk)) == [(a, b) for a in "abcd" for b in "abcd" if a != b]
