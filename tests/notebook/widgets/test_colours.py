"""Test that readers with and without colour blindness can distinguish the colours of a set, on light and dark ground.

Colour blindness is simulated as by Machado, Oliveira and Fernandes (2009) at full strength. Differences are those of
CIEDE2000, as in Sharma, Wu and Dalal (2005). A difference of 1 is just visible side by side.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

import nbkit
from nbkit.notebook.widgets.javascript import colours

NOTEBOOK = Path(nbkit.__file__).parent / "notebook"
GROUNDS = ("#ffffff", "#23272e")
IDLE = ("#dfe3e8", "#3c434d")
CELLS = ("#eeeeee", "#424242")  # of JupyterLab's themes, behind the bars of ranks
APART = 12.0
Colour = tuple[float, float, float]
SEEN_BY = {
    "everybody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, by: str) -> Colour:
    """Return the colour in CIELAB, as a reader of this kind sees it."""
    raw = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in raw]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in SEEN_BY[by])
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: Colour, other: Colour) -> float:
    """Return the difference of two colours by CIEDE2000."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    grow = 1.5 - 0.5 * math.sqrt(mean_c**7 / (mean_c**7 + 25**7))
    a1, a2 = a1 * grow, a2 * grow
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * math.cos(math.radians(hue - 30))
        + 0.24 * math.cos(math.radians(2 * hue))
        + 0.32 * math.cos(math.radians(3 * hue + 6))
        - 0.20 * math.cos(math.radians(4 * hue - 63))
    )
    dl = (l2 - l1) / (1 + 0.015 * (mean_l - 50) ** 2 / math.sqrt(20 + (mean_l - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * mean_c)
    dh = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * mean_c * t)
    rotation = -2 * math.sqrt(mean_c**7 / (mean_c**7 + 25**7))
    rotation *= math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def test_the_colour_difference_equals_that_of_published_pairs() -> None:
    assert apart((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert apart((50.0, 2.5, 0.0), (58.0, 24.0, 15.0)) == pytest.approx(19.4535, abs=1e-4)
    assert apart((6.7747, -0.2908, -2.4247), (5.8714, -0.0985, -2.2286)) == pytest.approx(0.6377, abs=1e-4)


def colours_of(name: str) -> dict[str, str]:
    """Return meaning -> colour of a set in paint.js, or of the LAPS of a step.

    LAPS are the parts of a step over time: those of COLOURS, with forward and backward instead of compute.
    """
    if name == "LAPS":
        return {**colours_of("COLOURS"), **{key: colours_of("PASSES")[key] for key in ("F", "B")}}
    return colours(name)


@pytest.mark.parametrize("by", SEEN_BY)
@pytest.mark.parametrize(
    ("name", "grounds"),
    [
        ("COLOURS", GROUNDS),
        ("MEMORY", GROUNDS),
        ("PASSES", IDLE),
        ("LAPS", IDLE),
        ("FAMILIES", GROUNDS + CELLS),
    ],
)
def test_the_colours_of_a_set_are_distinguishable(name: str, grounds: tuple[str, ...], by: str) -> None:
    colours = set(colours_of(name).values())  # forward has the colour of compute

    assert len(colours) >= 3
    for one, other in itertools.combinations([*colours, *grounds], 2):
        if not {one, other} <= set(grounds):
            assert apart(seen(one, by), seen(other, by)) >= APART, (one, other)


def test_colours_of_different_sets_are_distinguishable() -> None:
    """Compare the panel with the dashboard, because a notebook can show both."""
    sets = [set(colours_of(name).values()) for name in ("COLOURS", "MEMORY", "FAMILIES")]

    for these, those in itertools.combinations(sets, 2):
        for one, other in itertools.product(these, those):
            assert apart(seen(one, "everybody"), seen(other, "everybody")) >= 9, (one, other)


def test_colours_of_families_have_contrast_to_both_grounds_and_to_text() -> None:
    def light(colour: str) -> float:
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for colour in colours("FAMILIES").values():
        assert contrast(colour, "#ffffff") >= 2.4 and contrast(colour, "#23272e") >= 3, colour
        assert max(contrast(colour, ink) for ink in ("#16181c", "#ffffff")) >= 4.2, colour


def test_every_view_takes_the_colours_of_strategies_from_paint_js() -> None:
    """Check that they all use FAMILIES of paint.js."""
    ours = set(colours("FAMILIES").values())
    files = [path for path in NOTEBOOK.rglob("*") if path.suffix in (".py", ".js", ".css") and path.name != "paint.js"]

    assert len(files) > 30
    assert [path.name for path in files if ours & set(re.findall(r"#\w{6}", path.read_text()))] == []
    for name in ("panel.js", "curves.js", "charts.js"):  # panel; dashboard and report; TensorBoard's tab
        (path,) = NOTEBOOK.rglob(name)
        assert "FAMILIES" in path.read_text()
