"""Test the offers when memory runs out: their seconds and peak bytes equal the panel's, and the shortest step is
first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

from nbkit.planner.link_speed import OperationSpeed
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.estimate.strategy_table import measure_peaks, table
from nbkit.rank.train.job import Job
from nbkit.rank.train.out_of_memory.remedies import Remedies, alternatives, described, remedies
from nbkit.strategy import Strategy

pytestmark = pytest.mark.usefixtures("rows_are_known")

CONFIG = GPTConfig(vocab=64, block=16, layers=4, heads=2, width=64)
OPERATIONS = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send")
ROWS = 8


class Counting(GPT):
    """A model whose output depends on the number of its calls."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids) * (1 + 1 / self.calls)


def hooked() -> GPT:
    model = GPT(CONFIG)
    next(model.parameters()).register_hook(torch.sign)
    return model


def job_of(strategy: str, model: Callable[[], GPT] = lambda: GPT(CONFIG)) -> Job:
    ids = torch.randint(0, 64, (ROWS, 17), generator=torch.Generator().manual_seed(0))
    trainer = quiet(
        model=model,
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=[(row[:-1], row[1:]) for row in ids],
        batch_size=ROWS,
        strategy=strategy,
    )
    trainer.fit(1)  # makes the optimizer's state, so that it counts
    job: Job = trainer.job
    return job


def told(found: Remedies) -> list[tuple[str, float | None, int | None]]:
    return [(row.changes, row.seconds, row.peak) for row in found.rows]


def offered(world: Any, speeds: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return the offers for each speed of the link, with seconds that do not depend on the machine's load."""
    job = job_of("ddp")
    job.builder.finder.sync([Strategy(pp=2), *alternatives(job)])
    job.builder.finder.set_facts(costs=(0.1,) * 4)
    found = []
    for speed in speeds:
        ways = dict.fromkeys(OPERATIONS, OperationSpeed(1e-3, speed))
        job.builder.link = replace(job.builder.link, ways=ways, crowded=False)
        job.forget_estimates()
        got = remedies(job, ROWS, None, ())
        list(measure_peaks(job))
        panel = {row["strategy"]: (row["predicted_step_s"], row["peak_bytes"]) for row in table(job)["options"]}
        text = "\n".join(described(got, lambda number: f"%train fit {number}"))
        found.append({"rows": told(got), "now": (got.seconds, got.peak), "panel": panel, "text": text})
    job.builder.link = replace(job.builder.link, crowded=True)
    found.append({"rows": told(remedies(job, ROWS, None, ()))})
    return found


def alone(world: Any) -> tuple[float | None, list[tuple[str, float | None, int | None]], list[list[str]]]:
    """Return (seconds of a step of GPT, its offers, offers to stricter models), without a link."""
    job = job_of("ddp")
    job.builder.finder.sync([Strategy(pp=2)])
    job.builder.finder.set_facts(costs=(0.1,) * 4)
    job.builder.may_cut()
    found = remedies(job, ROWS, None, ())
    others = []
    for model in (hooked, lambda: Counting(CONFIG)):
        job = job_of("ddp", model)
        job.builder.may_cut()
        others.append([changes for changes, _, _ in told(remedies(job, ROWS, None, ()))])
    return found.seconds, told(found), others


@pytest.mark.long
def test_offers_have_the_panels_seconds_and_bytes_and_the_shortest_is_first() -> None:
    slow, quick, unknown = run_ranks(offered, 2, (1e5, 1e12), timeout=120)[0]
    for one in (slow, quick):
        rows = {changes: (seconds, peak) for changes, seconds, peak in one["rows"]}
        assert None not in one["now"] and one["now"] == pytest.approx(one["panel"]["dp=2"])
        for strategy in ("dp=2 zero=2", "dp=2 zero=3", "tp=2"):
            assert rows[strategy] == pytest.approx(one["panel"][strategy]), strategy
        # The time of selective recomputation depends on the speed of memory, which is not measured.
        seconds = [each for changes, each, _ in one["rows"] if "selective" not in changes]
        assert None not in seconds and seconds == sorted(seconds, key=lambda each: float(f"{each:.2g}"))
        assert [each for _, each, _ in one["rows"]] == [*seconds, None, None]
        assert rows["recompute=True"][1] <= rows["recompute='selective'"][1] <= one["now"][1]
        assert f"≈ {rows['recompute=True'][0] * 1e3:.3g} ms" in one["text"]
    # A third more computation is expensive with fast links, and cheap with slow ones.
    first = {name: [changes for changes, _, _ in one["rows"][:-2]] for name, one in (("slow", slow), ("quick", quick))}
    assert first["quick"][-1].endswith("recompute=True"), quick["rows"]
    assert first["slow"].index("recompute=True") < first["slow"].index("dp=2 zero=3"), slow["rows"]
    assert first["quick"].index("dp=2 zero=3") < first["quick"].index("recompute=True")
    # If ranks share cores, nothing is predicted, and offers are ordered by kind.
    assert {seconds for _, seconds, _ in unknown["rows"]} == {None}
    assert [changes for changes, _, _ in unknown["rows"]][1:3] == ["recompute='selective'", "recompute=True"]


@pytest.mark.long
def test_one_process_is_offered_micro_batches_and_recomputation_if_allowed() -> None:
    now, rows, others = run_ranks(alone, 1, timeout=120)[0]
    seconds = {changes: each for changes, each, _ in rows}
    assert now is not None and list(seconds) == ["microbatch_size=4", "recompute=True", "recompute='selective'"]
    assert seconds["microbatch_size=4"] == now and seconds["recompute=True"] == pytest.approx(4 / 3 * now)
    # A hook would get the gradient of only some rows. A model that counts its calls must not be called more often.
    assert others == [["recompute='selective'", "recompute=True"], []]
