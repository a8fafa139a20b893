"""Test that the selftest times attention under context parallelism, on CPU ranks and the pretended GPU."""

from __future__ import annotations

from typing import Any

import pretend
import pytest
from ranks import run_ranks

from nbkit.rank.selftest import speed

TOKENS, WIDTH = 16, 64


def timed(at: Any, pretended: bool) -> dict[int, dict[str, Any]]:
    """Return the times by degree. pretended: on the pretended GPU, where `at` is the rank."""
    speed.PAIRS = 2
    if not pretended:
        return {degree: speed.context(degree, (TOKENS, WIDTH)) for degree in (2, 4)}
    _, gpu = pretend.join(at, 4)
    with pretend.checked(gpu):
        return {degree: speed.context(degree, (TOKENS, WIDTH)) for degree in (2, 4)}


@pytest.mark.parametrize("pretended", [False, True])
def test_attention_under_cp_is_timed_and_sends_the_bytes_of_the_formula(
    pretended: bool,
) -> None:
    for found in run_ranks(timed, 4, pretended, join=not pretended):
        for degree, one in found.items():
            assert len(one["cp"]) == len(one["one"]) == 2 and min(*one["cp"], *one["one"]) > 0
            # Keys and values are gathered in forward and in backward, and their gradients are summed.
            keys_and_values = 2 * degree * TOKENS * WIDTH * (2 if pretended else 4)
            assert one["sent"] == pytest.approx(3 * (degree - 1) / degree * keys_and_values)
            assert one["hidden"] is None or 0 <= one["hidden"] <= 1
