"""A quantity that is shown in two places is the same number there, to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tables import answer_of
from torch.nn import functional as F

import nbkit
from nbkit.figures import seconds, size
from nbkit.notebook.board.plugin.plugin import RunCatalog
from nbkit.notebook.cluster.training_control import ControlResult
from nbkit.notebook.run.reader import RunReader
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.notebook.widgets.panel.view import Looked, State, job_view, reduce
from nbkit.notebook.widgets.training_card import card_text
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.estimate import strategy_table

CONFIG = GPTConfig(vocab=64, block=32, layers=4, heads=4, width=64)
STRATEGIES = ("zero3", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "tp", "pp")))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(row[:-1], row[1:]) for row in torch.randint(0, CONFIG.vocab, (64, CONFIG.block + 1), generator=draw)]


def trained(world: Any, folder: str, strategy: str) -> dict[str, Any]:
    trainer = nbkit.Trainer(
        model=lambda: GPT(CONFIG),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=rows(),
        batch_size=16,
        seed=1,
        log_dir=folder,
        progress=False,
        strategy=strategy,
    )
    job = trainer.job
    trainer.fit(21)
    list(strategy_table.measure_peaks(job))
    trained_table = strategy_table.table(job)
    compared = trainer.compare("zero2", steps=5)
    return {
        "run": str(trainer.run_dir),
        "trained": trained_table,
        "compared": compared,
        "after": strategy_table.table(job),
        "tried": trainer.try_out("zero1", 5),
        "then": strategy_table.table(job),
    }


@pytest.fixture(scope="module", params=STRATEGIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    found: dict[str, Any] = run_ranks(trained, 2, str(folder), request.param, timeout=240)[0]
    reader = RunReader(Path(found["run"]))
    (summary,) = RunCatalog(folder).summaries()
    return found | {"picture": reader.picture(), "snapshot": reader.snapshot(), "summary": summary}


def panel_row(table: dict[str, Any], strategy: str = "") -> dict[str, Any]:
    job = job_view(reduce(State("lesson", 2), Looked(answer_of(table))))
    row: dict[str, Any] = next(row for row in job["rows"] if row["strategy"] == (strategy or table["strategy"]))
    return row


def shown(compared: dict[str, Any]) -> list[tuple[str, ...]]:
    return ControlResult("1", "compare", {}, 21, "", True, "", "", "", "", compared).compared[1:]


def test_peak_and_bytes_at_rest_are_those_that_the_dashboard_draws(run: dict[str, Any]) -> None:
    row, memory = panel_row(run["trained"]), run["picture"]["memory"]
    assert row["peak"] == size(max(one["peak"] for one in memory))
    assert row["memory"] == size(max(one["at_rest"] for one in memory))
    text = plain(lines_of(run["snapshot"]))
    if run["trained"]["strategy"] == "dp=2":  # what is examined on rank 0 for the panel is no part of a step
        assert len({(one["at_rest"], one["peak"]) for one in memory}) == 1
    for one in memory:
        assert sum(one["formula"]) == one["at_rest"]
        assert one["activations"] == one["peak"] - one["at_rest"] > 0
        assert f"{size(one['at_rest'])} at rest, peak {size(one['peak'])}" in text


def test_what_a_rank_sends_is_the_same_in_panel_dashboard_tab_and_report(run: dict[str, Any]) -> None:
    sent = size(run["picture"]["sent"])
    assert panel_row(run["trained"])["sends"] == sent
    assert size(run["summary"]["sent"]) == sent  # the list of runs in the tab
    assert f"the busiest rank sends {sent}" in plain(lines_of(run["snapshot"]))
    assert run["snapshot"]["step"]["sent"] == run["picture"]["sent"]  # the report draws the snapshot


def test_a_comparison_shows_what_the_panel_shows_then(run: dict[str, Any]) -> None:
    for name, step, between, peak, sent in shown(run["compared"]):
        row = panel_row(run["after"], name)
        assert (row["step"], row["peak"], row["sends"]) == (step, peak, sent), name
        assert row["margin"] == f"{between} of 5 steps"
    # The strategy in force sends and holds in a comparison what it does in the training.
    assert (peak_and_sent(run["after"])) == peak_and_sent(run["trained"])


def peak_and_sent(table: dict[str, Any]) -> tuple[str, str]:
    row = panel_row(table)
    return row["peak"], row["sends"]


def test_a_trial_shows_what_the_panel_shows_then(run: dict[str, Any]) -> None:
    tried = run["tried"]
    assert panel_row(run["then"], tried["strategy"])["step"] == seconds(tried["step_s"])
    if tried["before_step_s"] is not None:
        assert panel_row(run["then"])["step"] == seconds(tried["before_step_s"])


def test_seconds_and_rate_are_the_same_on_card_dashboard_and_tab(run: dict[str, Any]) -> None:
    picture, summary, snapshot = run["picture"], run["summary"], run["snapshot"]
    rate = snapshot["state"]["rate"]
    assert summary["rate"] == rate
    assert f"{rate:,.0f} tokens/s" in plain(lines_of(snapshot)) and f"{rate:,.0f} tokens/s" in card_text(snapshot)
    assert seconds(summary["seconds"]) == seconds(picture["seconds"]) == panel_row(run["trained"])["step"]
    assert all(seconds(bar[1]) == seconds(picture["seconds"]) for bar in picture["ranks"])


def test_a_bubble_is_the_same_in_bars_and_tab(run: dict[str, Any]) -> None:
    bars, parts = run["picture"]["ranks"], run["summary"]["parts"]
    assert seconds(sum(bar[5] for bar in bars) / len(bars)) == seconds(parts[3])
