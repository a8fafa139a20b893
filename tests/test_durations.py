"""Lengths of time as people type them."""

import pytest

from nbkit.durations import seconds_given, seconds_of, text_of
from nbkit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), (45, 45), ("0.5s", 0.5), ("10min", 600), ("2 h", 7200), (" 1.5h ", 5400), ("1d", 86400)],
)
def test_a_number_with_its_unit_is_a_length_of_time(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "h", "2 hours", "-3s", "1e3", "0", "0min", "nan", "2h30min"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="10min"):
        seconds_of(text)


def test_what_a_function_is_given_is_a_text_with_a_unit_or_seconds() -> None:
    assert [seconds_given(value) for value in ("2h", "30", 0.3, 0, None)] == [7200, 30, 0.3, 0, None]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (40, "40 s"), (720, "12 min"), (7200, "2 h"), (3e5, "3.5 d")]
)
def test_it_reads_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert text_of(seconds) == text
