"""The card follows the steps also while it is too early for another picture of all ranks, which costs far more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fake_run import FakeRun

from nbkit.notebook.widgets.training_card import LiveCard


def test_steps_are_followed_between_two_pictures(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2, "dp=2")
    shown: list[dict[str, str]] = []
    execution = cast(Any, SimpleNamespace(observers=[]))
    card = LiveCard(execution, lambda: run.folder, lambda: True, lambda put, bundle: shown.append(bundle))

    for _ in range(2):
        run.step()
    card._look()
    card._picture_due = float("inf")
    run.step()
    card._look()

    assert [bundle["text/plain"].split(" · ")[0] for bundle in shown] == ["dp=2   step 2", "dp=2   step 3"]
    run.close()
