"""The third lesson, executed on four CPU ranks by a reader who guesses; its cells check the pictures by the facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.notebook.cluster import registry
from nbkit.notebook.headless import Headless, read_notebook, shown_by, tagged, text_of

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "03_read_the_dashboard.ipynb"
# A delay that stands out on a busy machine.
SMALL = 'CLUSTER = "-n 4 --cpu --ttl 10min"\nSTEPS, SLEEP = 7, 0.4'
# Two of them are wrong: the second forgets the backward pass, the fourth the weights.
GUESSES = {"slow-rank": "None", "micro-batch": "2", "bubble": "None", "staircase": "0.5", "traffic": "2"}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lesson")
    notebook = read_notebook(NOTEBOOK)
    (parameters,) = tagged(notebook, "parameters")
    parameters["source"] = SMALL
    for cell, guess in zip(tagged(notebook, "guess"), GUESSES.values(), strict=True):
        cell["source"] = f"guess = {guess}"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
            patch.setenv(name, str(folder / name))
        with Headless(folder, lambda cell, text: None) as kernel:
            kernel.run(notebook)  # raises for the first cell that fails
        yield notebook


def printed(notebook: dict[str, Any], tag: str) -> str:
    (cell,) = tagged(notebook, tag)
    return text_of(cell)


# Left to make long: what the pictures show is proven in tests/rank/telemetry and tests/notebook/widgets.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


def test_the_slow_rank_is_read_from_the_picture(executed: dict[str, Any]) -> None:
    said = printed(executed, "slow-rank")

    assert "for rank 2, which computes" in said
    assert re.search(r"measured: \d+ ms; no guess", said)


def test_four_micro_batches_gather_four_times_as_much(executed: dict[str, Any]) -> None:
    said = printed(executed, "micro-batch")

    assert "measured: 4 times; you said 2 times: look again" in said
    once, four = (int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", said))
    assert four == 4 * once


def test_more_stages_idle_more(executed: dict[str, Any]) -> None:
    two, four = (int(share) for share in re.findall(r"measured (\d+)%", printed(executed, "bubble")))

    assert 17 <= two < four


def test_the_staircase_of_zero_is_that_of_the_formula(executed: dict[str, Any]) -> None:
    said = printed(executed, "staircase")

    assert [int(share) for share in re.findall(r"(\d+)% of ddp", said)] == [100, 62, 44, 25]
    assert all(0.99 < float(ratio) < 1.01 for ratio in re.findall(r"formula ([\d.]+)", said))
    assert "measured: 0.25; you said 0.5: look again" in said


def test_what_tensor_parallelism_sends_grows_with_the_batch(executed: dict[str, Any]) -> None:
    said = printed(executed, "traffic")

    assert "measured: 2 times; you said 2 times: right" in said
    assert re.search(r"ddp .*: 1\.00 times", said)


def test_the_dashboard_is_shown_where_widgets_are_missing_too(executed: dict[str, Any]) -> None:
    (cell,) = tagged(executed, "dashboard")

    assert "rank 2" in shown_by(cell) and "measured, one bar per rank" in shown_by(cell)


def test_the_notebook_keeps_a_picture_in_place_of_the_dashboard(executed: dict[str, Any]) -> None:
    """A page that reads it later has no kernel, and would say that it cannot display the widget."""
    (cell,) = tagged(executed, "dashboard")
    (output,) = cell["outputs"]

    assert set(output["data"]) == {"text/plain", "image/svg+xml"}
    assert "rank 2" in output["data"]["image/svg+xml"]


@pytest.mark.usefixtures("executed")
def test_the_lesson_stops_its_cluster() -> None:
    assert registry.entries() == []
