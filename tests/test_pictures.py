"""Test that each drawing of the manual equals what its script draws, and each page of Concepts shows its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.concept_pictures import DRAWINGS, FOLDER
from tests.support.live_switch import FILE, PICTURE, draw

PAGES = sorted(page for page in FOLDER.parent.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_stored_drawing_equals_what_the_script_draws(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DRAWINGS[name]().svg(), "python -m tests.support.concept_pictures"


def test_the_live_switch_picture_is_drawn_from_the_stored_run() -> None:
    run = json.loads(FILE.read_text())

    assert PICTURE.read_text() == draw(run).svg(), "python -m tests.support.live_switch"
    assert max(abs(a - b) for a, b in zip(run["losses"], run["alone"], strict=True)) < 1e-12
    assert all(switch["identical"] for switch in run["switches"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_concepts_shows_its_drawing_with_alt_text(page: Path) -> None:
    ((words, picture),) = re.findall(r"!\[([^]]*)\]\(([^)]*)\)", page.read_text())

    assert picture == f"pictures/{page.stem}.svg"
    assert len(words) > 40
    assert "After this page you can" in page.read_text().splitlines()[2]
