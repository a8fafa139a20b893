"""Test that durations are parsed and printed as people type them."""

import pytest

from nbkit.durations import seconds_given, seconds_of, text_of
from nbkit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), (45, 45), ("0.5s", 0.5), ("10min", 600), ("2 h", 7200), (" 1.5h ", 5400), ("1d", 86400)],
)
def test_a_number_with_a_unit_is_parsed_as_seconds(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "h", "2 hours", "-3s", "1e3", "0", "0min", "nan", "2h30min"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="10min"):
        seconds_of(text)


def test_an_argument_is_text_with_a_unit_or_a_number_of_seconds() -> None:
    assert [seconds_given(value) for value in ("2h", "30", 0.3, 0, None)] == [7200, 30, 0.3, 0, None]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (40, "40 s"), (720, "12 min"), (7200, "2 h"), (3e5, "3.5 d")]
)
def test_text_uses_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert text_of(seconds) == text
