"""The fourth lesson and later ones, executed on CPU ranks; their cells compare what they say with what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.notebook.cluster import registry
from nbkit.notebook.headless import Headless, read_notebook, tagged, text_of

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"
# name -> parameters, guesses
CASES = {
    "19_break_it": ('CLUSTER = "-n 4 --cpu --ttl 10min"\nSTEPS, PACE = 24, 0.2', ("0", "4", "3", "8")),
}

# Left to make long: see tests/rank/train/test_unequal_speeds.py and tests/bench/test_formulas.py.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


@pytest.fixture(scope="module", params=CASES)
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lesson")
    notebook = read_notebook(LESSONS / f"{request.param}.ipynb")
    small, guesses = CASES[request.param]
    (parameters,) = tagged(notebook, "parameters")
    parameters["source"] = small
    for cell, guess in zip(tagged(notebook, "guess"), guesses, strict=True):
        cell["source"] = f"guess = {guess}"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
            patch.setenv(name, str(folder / name))
        with Headless(folder, lambda cell, text: None) as kernel:
            kernel.run(notebook)  # raises for the first cell that fails
        assert registry.entries() == []
        yield notebook


def test_what_the_lesson_says_is_what_was_measured(executed: dict[str, Any]) -> None:
    said = {tag: text_of(cell) for tag in FOURTH for cell in tagged(executed, tag)}

    assert set(said) == set(FOURTH)
    for tag, text in said.items():
        assert re.search(FOURTH[tag], text), text


FOURTH = {
    "new": r"24 losses; this rank is new",
    "killed": r"measured: 0 losses; you said 0 losses: right",
    "squeezed": r"measured: 2 rows; you said 4 rows: look again",
    "named": r"measured: 3; you said 3: right",
    "sizes": r"dp=4 -> dp=2 -> dp=4\nmeasured: 8 rows; you said 8 rows: right",
}
