"""Test how numbers are printed."""

import ast
import json
import math
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from nbkit.figures import figure, seconds, size

ROOT = Path(__file__).resolve().parents[1]
PAINT = ROOT / "nbkit/notebook/board/plugin/static/paint.js"


@pytest.mark.parametrize(
    ("value", "text"), [(12_345.6, "12,346"), (2.31449, "2.314"), (0.00012345, "0.0001234"), (999.96, "1000"), (0, "0")]
)
def test_large_numbers_are_whole_and_small_ones_have_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_not_shown(value: float) -> None:
    assert figure(value) == ""


@pytest.mark.parametrize("path", ["nbkit/rank/telemetry/sinks.py", "nbkit/notebook/widgets/dashboard/text_view.py"])
def test_the_printed_line_and_the_dashboard_use_the_same_number_format(path: str) -> None:
    module = ast.parse((ROOT / path).read_text())

    assert any(isinstance(each, ast.ImportFrom) and each.module == "nbkit.figures" for each in module.body)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (0, "0 B"), (999.6, "1 kB"), (841_720, "842 kB"), (1e6, "1 MB"), (2e12, "2 TB")],
)
def test_bytes_have_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (0, "0 s"),
        (2e-5, "20 µs"),
        (0.9996, "1 s"),
        (0.17586, "176 ms"),
        (73.25, "73.2 s"),
        (4321, "4,321 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's functions")
def test_the_web_page_prints_bytes_seconds_and_rates_like_the_notebook() -> None:
    draw = random.Random(0)
    values = [10 ** draw.uniform(-3.9, 12) for _ in range(500)] + [1.0, 1000.0, 999.4, 1e6]
    script = (
        f"import {{bytes, seconds, number}} from '{PAINT.as_uri()}';"
        "const values = JSON.parse(process.argv[1]);"
        "console.log(JSON.stringify(values.map((value) => [bytes(value), seconds(value), number(value)])))"
    )
    command = ["node", "--input-type=module", "-e", script, json.dumps(values)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
    assert found == [[size(value), seconds(value), figure(value)] for value in values]
