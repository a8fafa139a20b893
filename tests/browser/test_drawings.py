"""Test that no word of a drawing overlaps another, leaves its box or leaves the picture, in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DRAWINGS = sorted((ROOT / "docs" / "concepts" / "pictures").glob("*.svg"))
MISPLACED = """() => {
  const {width, height} = document.querySelector("svg").viewBox.baseVal;
  const boxes = [...document.querySelectorAll("rect:not(.paper)")].map((box) => box.getBBox());
  const words = [...document.querySelectorAll("text")].map((text) => [text.textContent, text.getBBox()]);
  const found = [];
  words.forEach(([text, at], number) => {
    const [x, y] = [at.x + at.width / 2, at.y + at.height / 2];
    if (at.x < 3 || at.x + at.width > width - 3 || at.y < 0 || at.y + at.height > height) found.push(text);
    for (const [other, its] of words.slice(0, number))
      if (at.x < its.x + its.width - 1 && its.x < at.x + at.width - 1 && Math.abs(at.y - its.y) < 12)
        found.push(text + " | " + other);
    for (const box of boxes)
      if (x > box.x && x < box.x + box.width && Math.abs(y - box.y - box.height / 2) < 4 && at.width > box.width)
        found.push(text + " is wider than its box");
  });
  return found;
}"""


def test_no_word_overlaps_another_or_leaves_its_box(browser: Any) -> None:
    page = browser.new_page()
    misplaced = {}
    for drawing in DRAWINGS:
        page.goto(drawing.as_uri())
        if found := page.evaluate(MISPLACED):
            misplaced[drawing.name] = found

    assert len(DRAWINGS) >= 14
    assert misplaced == {}
