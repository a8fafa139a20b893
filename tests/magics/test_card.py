"""Test, in a real kernel, that a cell that trains shows a card, updates it in place, and ends it as a summary."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kernel_client import Cell, Kernel

TRAINER = """%%distributed
torch.set_num_threads(1)
import time
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=16, layers=1, heads=2, width=16)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=nbkit.TextDataset(block=16, limit=20_000), batch_size=8, progress=False,
    callbacks=[lambda *_: time.sleep(0.05)])"""


@pytest.fixture(scope="module")
def kernel(kernel: Kernel) -> Kernel:
    assert kernel.run(TRAINER).status == "ok"
    return kernel


def cards(cell: Cell) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, data) of every message of a card, without the clock that is shown before a slow first step."""
    return [
        (kind, content["data"])
        for _, kind, content in cell.messages
        if content.get("transient", {}).get("display_id", "").startswith("nbkit-card-")
        and "nbkit-clock" not in content["data"]["text/html"]
    ]


def test_a_cell_that_trains_shows_a_card_that_ends_as_its_summary(kernel: Kernel) -> None:
    found = cards(kernel.run("%%distributed\ntrainer.fit(60)"))

    assert {kind for kind, _ in found[1:]} == {"update_display_data"}
    first, last = found[0][1], found[-1][1]
    assert first["text/plain"].startswith("dp=2   step ") and " of 60 · " in first["text/plain"]
    assert last["text/plain"].startswith("dp=2   60 steps · loss ") and "→" in last["text/plain"]
    assert "<img src='data:image/svg+xml;base64," in last["text/html"]  # an untrusted notebook keeps images
    assert set(last) == {"text/plain", "text/html"}  # no widget whose state a saved notebook would lack


def test_a_cell_that_waits_shows_a_clock_and_its_total_time(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\ntime.sleep(4.5)")
    clocks = [
        content["data"]["text/plain"]
        for _, kind, content in cell.messages
        if "nbkit-clock" in content.get("data", {}).get("text/html", "")
    ]
    assert {"3 s", "4 s"} & set(clocks) and re.fullmatch(r"took \d+ s", clocks[-1])
    assert cards(cell) == []


def test_the_next_cell_has_a_card_for_its_own_steps(kernel: Kernel) -> None:
    found = cards(kernel.run("%%distributed\ntrainer.fit(50)"))

    assert found[-1][1]["text/plain"].startswith("dp=2   50 steps, 110 with those before · ")
    # The steps are counted from the first cell.
    step = re.match(r"dp=2   step (\d+) of 110 · ", found[0][1]["text/plain"])
    assert step is not None and 60 < int(step[1]) <= 110


@pytest.mark.long
def test_a_cell_that_fails_shows_the_error_on_its_card(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\ndef fail(trainer, record):\n"
        "    if record['step'] == 160 and rank == 1: raise ValueError('odd')\n"
        "trainer._callbacks += (fail,)\ntrainer.fit(200)"
    )
    assert cell.status == "error"
    assert "ended by an error: rank 1: ValueError: odd" in cards(cell)[-1][1]["text/plain"]


def test_a_cell_that_does_not_train_has_no_card(kernel: Kernel) -> None:
    assert cards(kernel.run("%%distributed\nimport time; time.sleep(4)")) == []
    assert cards(kernel.run("%%distributed\n1 + 1")) == []
