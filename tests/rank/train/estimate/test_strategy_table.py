"""Test the table of a job: predicted savings of levers, measured seconds, and peak memory, also during a training."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.nn import functional as F

from nbkit.planner.choose.search import AGED
from nbkit.planner.link_speed import OperationSpeed
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.estimate.peak_bytes import PeakBytes, largest
from nbkit.rank.train.estimate.strategy_table import look_at_all, measure_peaks, option, table
from nbkit.rank.train.estimate.time_model import seconds_before_a_step
from nbkit.rank.train.step.history import History, Paces
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy

pytestmark = pytest.mark.usefixtures("rows_are_known")

CONFIG = GPTConfig(vocab=64, block=16, layers=2, heads=2, width=128)
MEASURED = ("step_s", "step_steps", "step_ago")
OPERATIONS = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send")


def trainer_of(strategy: str, optimizer: Any = torch.optim.SGD) -> Trainer:
    ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    return Trainer(
        model=lambda: GPT(CONFIG),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: optimizer(model.parameters(), lr=1e-3),
        data=[(row[:-1], row[1:]) for row in ids],
        batch_size=8,
        strategy=strategy,
        log_dir=None,
        progress=False,
    )


def tables(world: Any, speeds: tuple[float, ...]) -> list[dict[str, Any]]:
    job = trainer_of("ddp").job
    job.builder.finder.sync([Strategy(pp=2)])
    # These seconds do not depend on the load of the machine.
    job.builder.finder.set_facts(costs=(0.1,) * 4)
    found = []
    for speed in speeds:
        link = job.builder.link
        ways = dict.fromkeys(OPERATIONS, OperationSpeed(1e-4, speed))
        job.builder.link = replace(link, ways=ways, crowded=False)
        job.forget_estimates()
        plain = seconds_before_a_step(job.cost_model(), job.builder, Strategy(dp=2), 8)
        found.append({"plain": plain, **table(job)["levers"]})
    job.builder.choose(recompute=True)
    job.forget_estimates()
    found.append({"plain": seconds_before_a_step(job.cost_model(), job.builder, Strategy(dp=2), 8)})
    for step in (1, 2, 3):
        job.ledger.add({"step": step, "strategy": "dp=2 zero=1", "seconds": 0.25})
    found.append({row["strategy"]: (row["step_s"], row["predicted_step_s"]) for row in table(job)["options"]})
    for step in range(4, 504):
        job.ledger.add({"step": step, "strategy": "dp=2", "seconds": 0.5})
    found.append({row["strategy"]: [row[key] for key in MEASURED] for row in table(job)["options"]})
    return found


def test_the_table_has_levers_and_predictions_even_for_measured_strategies() -> None:
    slow, quick, again, rows, later = run_ranks(tables, 2, (1e6, 1e12), timeout=120)[0]
    assert set(quick) == {"plain"}
    assert again["plain"] == pytest.approx(4 / 3 * quick["plain"], rel=1e-2)  # blocks are recomputed once
    assert slow["strategy"] == "dp=2" and slow["step_s"] == pytest.approx(slow["plain"])
    each = slow["each"]
    assert {"compress=bf16", "compress=int8", "sync_every=8"} <= set(each)
    assert slow["step_s"] > each["compress=bf16"] > each["compress=int8"] > each["sync_every=8"]
    measured, predicted = rows["dp=2 zero=1"]  # a measured strategy has a prediction too
    assert measured == 0.25 and predicted == pytest.approx(again["plain"], rel=0.1)
    assert rows["dp=2 zero=2"][0] is None and rows["dp=2 zero=2"][1] is not None
    # After 500 steps under another strategy it still counts as measured. The first step of each is left out.
    assert later["dp=2 zero=1"] == [0.25, 2, 500] and later["dp=2"] == [0.5, 20, 0]
    assert later["dp=2 zero=2"] == [None, 0, 0]


def test_seconds_of_a_strategy_are_kept_after_its_records_are_thinned() -> None:
    ledger = History(world_size=1)
    for step in range(1, 30_022):
        ledger.add({"step": step, "strategy": "tp=2" if step <= 21 else "dp=2", "seconds": 0.2 + 1e-3 * (step % 2)})
    with ledger.silent():
        ledger.add({"step": 30_022, "strategy": "pp=2", "seconds": 9.0})
        ledger.add({"step": 30_023, "strategy": "pp=2", "seconds": 9.0})
    del ledger.records[-2:]
    ledger.records.thin()

    found = ledger.paces.of("tp=2")
    assert found is not None and (found.low, found.high, found.steps, found.ago) == (0.2, 0.201, 19, 30_000)
    assert ledger.paces.of("pp=2") is None  # this was a trial, which leaves nothing
    left = [record["step"] for record in ledger.records if record["strategy"] == "tp=2"]
    ledger.replace(30_021, list(ledger.records))  # like a load of a checkpoint
    found = ledger.paces.of("tp=2")
    assert left == [4, 8, 12, 16, 20] and found is not None and (found.steps, found.ago) == (4, 30_001)


def test_only_the_most_recent_of_many_strategies_are_remembered() -> None:
    paces = Paces({"step": step, "strategy": f"bucket={step // 2}M", "seconds": 0.1} for step in range(400))

    remembered = [number for number in range(200) if paces.of(f"bucket={number}M") is not None]
    assert remembered == list(range(136, 200))


def test_a_comparison_keeps_the_comparable_seconds_of_the_current_strategy() -> None:
    paces = Paces({"step": step, "strategy": "ddp", "seconds": 0.1} for step in range(1, 11))
    for strategy, seconds in (("ddp", 0.15), ("zero3", 0.2)):
        paces.measured(strategy, [seconds] * 8, compared=True)
    for step in range(11, 111):  # the machine is less busy than during the comparison
        paces.add({"step": step, "strategy": "ddp", "seconds": 0.05})
    row, newest = paces.of("ddp"), paces.newest("ddp")
    assert row is not None and (row.seconds, row.steps, row.ago, row.compared) == (0.15, 8, 100, True)
    assert newest is not None and (newest.seconds, newest.ago, newest.compared) == (0.05, 0, False)

    for step in range(111, 112 + AGED):
        paces.add({"step": step, "strategy": "ddp", "seconds": 0.05})
    row = paces.of("ddp")
    assert row is not None and row.seconds == 0.05  # the comparison was too long ago

    paces.measured("ddp", [0.15] * 8, compared=True)
    for strategy in ("zero3", "ddp"):  # a switch, and back
        for step in range(600, 620):
            paces.add({"step": step, "strategy": strategy, "seconds": 0.05})
    row = paces.of("ddp")
    assert row is not None and row.seconds == 0.05


def trained(world: Any, beside: bool) -> tuple[list[float], dict[str, int | None], dict[str, int]]:
    """Return (losses under cp, peaks of the table, the same peaks without a training). beside: measure the peaks during

    the training. Peaks are known on rank 0, as for a panel.
    """
    trainer = trainer_of("cp=2")
    job = trainer.job
    every = Strategy.every(2, schedules=("1f1b",))
    job.builder.finder.sync(every)
    thread = threading.Thread(target=lambda: list(measure_peaks(job)))
    if beside and job.rank == 0:
        thread.start()
    losses = [record["loss"] for record in trainer.fit(3)]
    if job.rank:
        return losses, {}, {}
    if beside:
        thread.join()
    rows = {row["strategy"]: row["peak_bytes"] for row in table(job)["options"] if row["ok"]}
    told = PeakBytes(job.builder, job.cost_model().census)
    tops = {str(one): largest(told.of(one, 8)) for one in every} if beside else {}
    return losses, rows, {text: top.total for text, top in tops.items() if top is not None}


@pytest.mark.long
def test_peaks_of_every_strategy_are_measured_during_training_without_effect() -> None:
    with_them, without = (run_ranks(trained, 2, beside, timeout=120)[0] for beside in (True, False))
    assert with_them[0] == without[0]
    assert {name for name, peak in without[1].items() if peak is not None} <= {"cp=2"}  # from the counted step
    own = with_them[1].pop("cp=2")  # from the counted step, if it is over by then
    assert own is not None and own >= 0.9 * with_them[2].pop("cp=2") and with_them[1] == with_them[2]


def typed(world: Any) -> dict[str, Any]:
    trainer = trainer_of("pp=2 schedule=gpipe microbatches=4")
    list(measure_peaks(trainer.job))
    look_at_all(trainer.job)
    rows = {row["strategy"]: row for row in table(trainer.job)["options"]}
    here = str(trainer.strategy)
    again = {strategy: option(trainer.job, strategy) for strategy in rows}
    other, none = (option(trainer.job, text) for text in ("ddp compress=bf16", "pp=2 schedule=zbv"))
    return {"here": here, "rows": rows, "again": again, "other": other, "none": none}


def test_any_strategy_gets_a_row_and_the_current_one_is_in_the_table() -> None:
    said = run_ranks(typed, 2, timeout=120)[0]

    assert said["again"] == said["rows"] and next(iter(said["rows"])) == said["here"]
    other = said["other"]
    assert other["ok"] and other["strategy"] == "dp=2 compress=bf16" and "dp=2" in said["rows"]
    assert 0 < other["step_bytes"] < said["rows"]["dp=2"]["step_bytes"]
    assert other["moved_bytes"] > 0 and other["memory"]["after"] > 0 and other["peak_bytes"] > 0
    assert not said["none"]["ok"] and "4 stages, 2 blocks" in said["none"]["why"]


def before_and_after_a_step(world: Any) -> list[dict[str, int]]:
    trainer, found = trainer_of("ddp", torch.optim.AdamW), []
    for steps in (0, 1):
        trainer.fit(steps) if steps else None
        found.append({row["strategy"]: row["memory"].get("after", 0) for row in table(trainer.job)["options"]})
    return found


def test_memory_before_the_first_step_includes_future_optimizer_state() -> None:
    before, after = run_ranks(before_and_after_a_step, 2, timeout=120)[0]

    assert before["dp=2 zero=1"] < 0.8 * before["dp=2"]
    assert before["dp=2"] == pytest.approx(after["dp=2"], rel=1e-2)
