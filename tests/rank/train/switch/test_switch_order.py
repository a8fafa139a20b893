"""Test that another order of ranks lets a switch move fewer bytes, with the same training, and all parts know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from nbkit.notebook.run import step_picture
from nbkit.notebook.run.follower import Run
from nbkit.planner.traffic import wire_bytes
from nbkit.rank.train.estimate import strategy_table
from nbkit.strategy import Strategy
from tests.rank.train.switch.test_switch import losses, trainer

PIPED = "tp=2 pp=2 microbatches=4"
THROUGH = ["dp=2 tp=2", "tp", PIPED]
ALSO_THROUGH = ["dp=2 tp=2", "tp", PIPED, "dp=2 tp=2 zero=3", "hsdp"]
pytestmark = pytest.mark.usefixtures("rows_are_known")

SLOWEST = {"dp=2 tp=2", "tp=2 pp=2 schedule=1f1b microbatches=4", "dp=2 tp=2 zero=3"}
EACH = 1
RUNS = "runs"


def never_switched(world: Any, steps: int) -> tuple[list[float], list[int]]:
    job = trainer()
    job.fit(steps)
    return losses(job), job.generate(torch.tensor([1, 2, 3]), 4).tolist()


def through_tp(world: Any, through: list[str]) -> dict[str, Any]:
    job = trainer(strategy="tp", log_dir=RUNS)
    job.fit(EACH)
    said = []
    for text in through:
        new = Strategy.parse(text, 4)
        job.job.builder.finder.sync([new])
        predicted, _ = strategy_table.moved_bytes(job.job, new)
        done = job.switch(text)
        options = strategy_table.table(job.job)["options"] if world.place.rank == 0 else []
        table = {row["strategy"]: row["moved_bytes"] for row in options}
        seen = job.job.cost_model()
        again = job.switch(text)  # this is the current strategy, in any order
        said.append(
            {
                "strategy": str(job.strategy),
                "slowest": job.strategy.slowest == "tp",
                "identical": done.identical,
                "bytes": (predicted, done.moved_bytes),
                "usual": seen.census.flow(Strategy.parse(done.old, 4), new).total,
                "sends": [list(map(wire_bytes, seen.terms(order))) for order in (job.strategy, new)],
                "stays": (table[str(job.strategy)] if table else 0, again.moved_bytes),
            }
        )
        job.fit(EACH)
    job.save("model.pt")
    job.load("model.pt")
    back = job.undo()
    job.fit(EACH)
    return {
        "losses": losses(job),
        "said": said,
        "back": (back.new, back.identical),
        "generated": job.generate(torch.tensor([1, 2, 3]), 4).tolist(),
        "run": str(job.job.run_dir),
    }


@pytest.mark.long
@pytest.mark.parametrize("through", [THROUGH, ALSO_THROUGH])
def test_the_rank_order_that_moves_fewer_bytes_trains_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, generated = run_ranks(never_switched, 1, EACH * (len(through) + 2))[0]
    found = run_ranks(through_tp, 4, through, timeout=150)
    composed = [str(Strategy.parse(text, 4)) for text in through]

    for rank in found:
        said = rank["said"]
        assert rank["losses"] == found[0]["losses"]
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=True)) <= 1e-10
        assert rank["generated"] == generated
        assert rank["back"] == (composed[-2], True)
        assert {each["strategy"] for each in said if each["slowest"]} == SLOWEST & set(composed)
        assert all(each["identical"] and each["bytes"][0] == each["bytes"][1] for each in said)
        assert all(each["stays"] == (0, 0) for each in said)
        assert all(each["sends"][0] == each["sends"][1] != [] for each in said)
        # Each rank already has half of what it holds under tp=4.
        assert said[0]["bytes"][1] < said[0]["usual"] * 0.7
        assert said[1]["bytes"][1] == 0

    run = Run(tmp_path / found[0]["run"])
    run.refresh()
    strategy, step = str(Strategy.parse(PIPED, 4)), EACH * (through.index(PIPED) + 2)
    drawn = [step_picture.of_step(run, step, strategy, replica=replica) for replica in (0, 1)]
    assert [each and (each["kind"], each["ranks"]) for each in drawn] == [("pipeline", [0, 1]), ("pipeline", [2, 3])]
    assert [{op[1] for op in row} for row in drawn[0]["measured"]] == [{0}, {1}]  # type: ignore[index]
