"""Numbers as people read them."""

import ast
import math
from pathlib import Path

import pytest

from nbkit.figures import figure

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("value", "text"), [(12_345.6, "12,346"), (2.31449, "2.314"), (0.00012345, "0.0001234"), (999.96, "1000"), (0, "0")]
)
def test_large_numbers_are_whole_and_small_ones_have_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_shown(value: float) -> None:
    assert figure(value) == ""


@pytest.mark.parametrize(
    "path", ["nbkit/rank/telemetry/progress_line.py", "nbkit/notebook/widgets/dashboard/text_view.py"]
)
def test_the_line_of_a_training_and_the_views_of_it_write_numbers_alike(path: str) -> None:
    module = ast.parse((ROOT / path).read_text())

    assert any(isinstance(each, ast.ImportFrom) and each.module == "nbkit.figures" for each in module.body)
