"""Test that strategies are measured in turns from one state, and the training goes on unchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from jobs import flat, heard, net, points, quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import StrategyError, TrainingError
from nbkit.notebook.cluster.training_control import ControlResult, verdict
from nbkit.rank.train.switch import compare


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def compared(world: Any) -> dict[str, Any]:
    def trainer() -> Any:
        return quiet(model=lambda: net(dropout=0.5), optimizer=adamw, data=points(40), batch_size=12)

    plain, tried = trainer(), trainer()
    plain.fit(6)
    tried.fit(3)
    turns, losses = list[str](), dict[str, set[tuple[float, ...]]]()
    measure = compare.measure

    def seen(job: Any, new: Any, steps: int, make_step: Any, **more: Any) -> Any:
        def noted() -> None:
            make_step()
            job.ledger.settle()
            made.append(job.ledger.records[-1]["loss"])

        made: list[float] = []
        turns.append(str(new))
        found = measure(job, new, steps, noted, **more)
        losses.setdefault(str(new), set()).add(tuple(made))
        return found

    compare.measure = seen  # type: ignore[assignment]
    events = heard(tried)
    told: dict[str, Any] = {"result": tried.compare("zero3", "ddp", "pp", steps=8), "turns": list(turns)}
    told["events"] = [event.kind for event in events]
    told["after"] = tried.step, str(tried.strategy), len(tried.history)
    tried.fit(3)
    told["same"] = (
        torch.equal(flat(plain.model), flat(tried.model)),
        [
            {**one, "seconds": 0} == {**other, "seconds": 0}
            for one, other in zip(plain.history, tried.history, strict=True)
        ],
    )
    told["batches"] = [len(each) for each in losses.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_MEMORY_LIMIT", "1")
        told["crowded"] = [row["error"] for row in tried.compare("zero3", steps=1)["strategies"]]
    normed = quiet(model=lambda: torch.nn.Sequential(*net(), torch.nn.BatchNorm1d(3)), data=points(40), batch_size=12)
    told["normed"] = normed.compare("pp=2 microbatches=2", steps=1)["strategies"][1]["error"]
    refused = []
    for act, kind in (
        (lambda: tried.compare("tp=3"), StrategyError),
        (lambda: quiet(data=iter(points()), hints=nbkit.ModelHints(example=None)).compare("zero3"), TrainingError),
    ):
        with pytest.raises(kind) as error:
            act()
        refused.append(str(error.value))
    return {**told, "refused": refused}


def test_a_comparison_of_strategies_does_not_change_the_training() -> None:
    first, second = run_ranks(compared, 2, timeout=180)

    for each in (first, second):
        names = [row["strategy"] for row in each["result"]["strategies"]]
        assert names[:2] == ["dp=2", "dp=2 zero=3"] and names[2].startswith("pp=2") and len(names) == 3
        assert each["turns"] == names + names[::-1]
        # Each turn starts from the same state and reads the same batches.
        assert each["batches"] == [1, 1, 1]
        assert each["after"] == (3, "dp=2", 3) and each["same"] == (True, [True] * 6)
        assert set(each["events"]) <= {"step", "run_started", "run_stopped"}
        assert all("memory does not hold both" in error for error in each["crowded"])
        assert "BatchNorm" in each["normed"]
        assert "gives each sample once" in each["refused"][1]
    assert first["result"] == second["result"]
    ddp, zero3, pp = first["result"]["strategies"]
    weights = 4 * sum(p.numel() for p in net().parameters())
    # ddp reduces all gradients and a few numbers of the step. zero3 gathers half of the weights twice, and reduces the
    # gradients. pp sends the activations of twelve rows forward, or their gradients backward.
    assert weights < ddp["sent_bytes"] < weights + 600
    assert weights / 2 <= zero3["sent_bytes"] - ddp["sent_bytes"] < weights  # with padding to equal parts
    assert 0 < pp["sent_bytes"] < 12 * 16 * 4 + 800  # with the shapes of the rows
    for row in (ddp, zero3, pp):
        assert 0 < row["low_s"] <= row["step_s"] <= row["high_s"] and row["peak_bytes"] > 3 * weights / 2


def test_a_comparison_is_shown_as_a_table() -> None:
    good = {"step_s": 0.5, "low_s": 0.4, "high_s": 2.0, "peak_bytes": 3e6, "sent_bytes": 1e3, "error": ""}
    rows = [{"strategy": "zero3", **good}, {"strategy": "tp=2", "error": "It <cannot> be split."}]
    result = ControlResult(
        "1", "compare", {}, 7, "zero3", True, "", "", "", "", {"steps": 20, "strategies": rows}, served=True
    )

    lines = repr(result).splitlines()
    assert lines[0] == "No other strategy could be measured beside zero3."
    assert lines[-1].strip() == (
        "20 steps each, in turns, after step 7, from the same state on the same batches; "
        "the training goes on under zero3"
    )
    assert re.split(r"\s{2,}", lines[2].strip()) == ["zero3", "500 ms", "0.4–2 s", "3 MB", "1 kB"]
    assert lines[3].split() == ["tp=2", "It", "<cannot>", "be", "split."]
    assert (
        "text-align:right;white-space:nowrap'>500 ms</td>" in result._repr_html_()
        and "It &lt;cannot&gt; be" in result._repr_html_()
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            (0.2, 0.19, 0.21),
            "tp=2 was the fastest of the 2 that were measured: 200 ms a step, 2.50 times as fast",
        ),
        (
            (0.48, 0.39, 0.6),
            "zero3, which runs now, took 500 ms a step in this comparison. No strategy was measurably faster.",
        ),
        ((0.7, 0.69, 0.71), "No strategy was measurably faster."),
        ((0.2, None, None), "Too few steps were measured"),
    ],
)
def test_the_verdict_names_a_faster_strategy_if_the_difference_is_larger_than_the_intervals(
    other: tuple[float, float | None, float | None], said: str
) -> None:
    rows = [
        {"strategy": name, "step_s": step, "low_s": low, "high_s": high, "error": ""}
        for name, (step, low, high) in (("zero3", (0.5, 0.45, 0.55)), ("tp=2", other))
    ]
    assert said in verdict(rows, "zero3")
