"""Test switches over two nodes: the axis that crosses them, the traffic between them, and equal training.

The ranks of one machine give two host names, as if two ranks ran on each of two nodes.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from nbkit.notebook.run import step_picture
from nbkit.notebook.run.follower import Run
from nbkit.planner import forecast
from nbkit.rank.comm import link_probe
from nbkit.rank.train.estimate import strategy_table
from tests.rank.train.switch.test_switch import losses, trainer

PIPED = "pp=2 microbatches=2"
THROUGH = (PIPED, f"{PIPED} order=dp", "ddp", "hsdp", f"{PIPED} order=pp")
EACH = 2
RUNS = "runs"
pytestmark = pytest.mark.usefixtures("rows_are_known")


def never_switched(world: Any) -> list[float]:
    job = trainer()
    job.fit(EACH * len(THROUGH))
    return losses(job)


def over_nodes(world: Any) -> dict[str, Any]:
    socket.gethostname = lambda: f"node{world.place.rank // 2}"  # type: ignore[attr-defined]
    assert link_probe._known is not None
    link_probe.know(replace(link_probe._known, node_of=(0, 0, 1, 1)))
    job = trainer(strategy=THROUGH[0], log_dir=RUNS)
    job.fit(EACH)
    said = []
    for text in THROUGH[1:]:
        old = job.job.sharded_model.plan
        done = job.switch(text)
        _, exchange = job.job.builder.exchanges._kept[old, job.job.sharded_model.plan]
        pairs = exchange.plan.pairs
        between = sum(size for (src, dst), size in pairs.items() if src // 2 != dst // 2)
        said.append((str(job.job.strategy), job.job.strategy.mesh.groups("dp"), done.identical, between))
        job.fit(EACH)
    options = strategy_table.table(job.job)["options"] if world.place.rank == 0 else []
    table = {row["strategy"]: row["between_bytes"] for row in options}
    return {"losses": losses(job), "said": said, "run": str(job.job.run_dir), "table": table}


@pytest.mark.long
def test_a_training_whose_axes_cross_nodes_in_turn_stays_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (expected,) = run_ranks(never_switched, 1)
    found = run_ranks(over_nodes, 4, timeout=240)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected, abs=1e-10) and rank["said"] == found[0]["said"]
    ordered, ddp, hsdp, back = found[0]["said"]
    assert ordered[:3] == ("dp=2 pp=2 schedule=1f1b microbatches=2 order=dp", [(0, 2), (1, 3)], True)
    assert back[1] == [(0, 1), (2, 3)] and back[0].endswith("order=pp")
    # Each node holds both stages, so its ranks get the missing parts of the model from each other.
    assert ddp[3] == 0 and hsdp[3] == 0

    run = Run(tmp_path / found[0]["run"])
    run.refresh()
    predicted = forecast.read(run.folder)
    for step in range(2, EACH * len(THROUGH) + 1):
        nodes = step_picture.picture(run, step)["traffic"]["nodes"]
        assert nodes["formula"] is not None and nodes["within"] > 0
        # Formulas leave out the sums of loss and norm over the world, counts, and padding.
        assert nodes["formula"] <= nodes["between"] < 1.1 * nodes["formula"] + 3000
    assert len({round(one.between or 0) for one in predicted}) == 3
    drawn = [step_picture.of_step(run, 2, predicted[1].strategy, replica=replica) for replica in (0, 1)]
    assert [each and each["ranks"] for each in drawn] == [[0, 1], [2, 3]]
    assert found[0]["table"]["dp=4"] == pytest.approx(predicted[2].between)
