"""The figures of a module that is run equal those of its formulas; for other models they come from the run alone."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import UsageError
from nbkit.notebook import planning
from nbkit.notebook.planning import explain, planned
from nbkit.planner.choose.load import Hardware, Known
from nbkit.planner.choose.search import search
from nbkit.planner.peak import GPTPieces
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts
from nbkit.rank.train.estimate import model_pieces
from nbkit.rank.train.estimate import model_trace as trace_model
from nbkit.rank.train.estimate.model_trace import ModelTrace
from nbkit.strategy import Strategy
from nbkit.trainer_options import RECOMPUTE

CONFIG = GPTConfig(vocab=256, block=64, layers=4, heads=4, width=128)
IDS = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
BATCH = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_module_is_planned_as_its_formulas_are() -> None:
    settings = {"batch": 64, "on": "2 A100", "precision": None}
    config = replace(CONFIG, layers=2)
    by_formula = nbkit.plan(config, **settings)
    measured = nbkit.plan(lambda: GPT(config), example=BATCH, loss=loss, **settings)
    rows = {row.strategy: row for row in measured.rows}
    assert measured.model == "GPT of 0.471 M parameters"
    assert rows.keys() == {row.strategy for row in by_formula.rows}
    assert {"tp=2", "dp=2 zero=3"} <= rows.keys() and any(Strategy.parse(text, 2).pp > 1 for text in rows)
    for said in by_formula.rows:
        found = rows[said.strategy]
        for part in ("parameters", "gradients", "optimizer"):
            sizes = getattr(found.peak, part), getattr(said.peak, part)
            assert sizes[0] == pytest.approx(sizes[1], rel=0.005), (said.strategy, part)
        assert found.peak.total == pytest.approx(said.peak.total, rel=0.08), said.strategy
        assert found.sent == pytest.approx(said.sent, rel=0.005), said.strategy


@pytest.mark.long
def test_a_model_is_measured_once_for_each_way_to_cut_it_and_recomputed_only_where_it_does_not_fit_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[int, bool | str]] = []
    trace = trace_model.trace

    def counted(facts: ModelFacts, options: JobOptions, *args: Any, tp: int, **kwargs: Any) -> ModelTrace:
        measured.append((tp, options.recompute))
        return trace(facts, options, *args, tp=tp, **kwargs)

    monkeypatch.setattr("nbkit.rank.train.estimate.peak_bytes.trace", counted)
    config = replace(CONFIG, layers=2, width=64)
    explain(GPT(config), "dp=2", "tp=2", example=BATCH, loss=loss, batch=8, on="2 A100")
    assert measured == [(1, False), (2, False)]
    measured.clear()
    look = model_pieces.describe(GPT(config), BATCH, loss=loss, degrees=[2])
    room = search(look, 512, Hardware.parse("2 A100"))
    least = min(row.peak.total for row in room.rows)
    tight = search(look, 512, Hardware.parse("2 A100"), memory=0.6 * least)
    assert len(measured) == 6 and set(measured) == {(tp, how) for tp in (1, 2) for how in RECOMPUTE}
    assert any(row.recompute for row in tight.rows)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_says_on_one_line_what_it_does_and_takes_the_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(planning, "_AFTER", 0.0)
    monkeypatch.setattr(planning, "_EVERY", 0.001)
    with planning.PlanningLine("plan", "counts") as line:
        while "counts (0 s)" not in screen.getvalue():
            time.sleep(0.001)
        line.say("adds")
        while "adds (0 s)" not in screen.getvalue():
            time.sleep(0.001)
    first, *_, last, left = screen.getvalue().split("\r")[1:]
    assert (first, last.strip(), left) == ("plan: counts (0 s)", "", "") and len(last) == len("plan: adds (0 s)")
    monkeypatch.setattr(planning, "_AFTER", 60.0)
    with planning.PlanningLine("plan", "ends at once"):
        pass
    assert "at once" not in screen.getvalue()


@pytest.mark.long
def test_multiplications_are_counted_on_what_each_axis_leaves() -> None:
    look = model_pieces.describe(GPT(CONFIG), BATCH, loss=loss, degrees=[2])
    formula = GPTPieces(CONFIG)
    assert look.flops(1, 1) == formula.flops()
    assert look.flops(2, 1) == formula.flops() / 2
    # The costs of the pieces agree too, the head being part of the last: a pipeline is cut by them.
    assert look.costs() == pytest.approx([2 * CONFIG.block * cost for cost in formula.costs()])
    assert look.costs()[-1] > 1.1 * look.costs()[0]
    for text in ("pp=2", "pp=4", "pp=2 schedule=zbv"):
        strategy = Strategy.parse(text, 4 if "4" in text else 2)
        assert Known(look).shares(strategy) == pytest.approx(Known(formula).shares(strategy)), text
    assert 0.5 < look.touched(1, 1) / formula.touched() < 1.5


def test_what_is_frozen_has_neither_gradient_nor_state() -> None:
    model = GPT(CONFIG)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    look = model_pieces.describe(model, BATCH, loss=loss)
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(p.numel() for p in model.parameters())
    assert (look.each.parameter, look.each.gradient) == (4, pytest.approx(4 * share))
    assert look.each.optimizer == pytest.approx(8 * share)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        body = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)]
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), *body, nn.Flatten(), nn.Linear(8 * 64, 10))


def test_of_a_model_of_another_kind_the_data_axis_and_the_pipeline_are_planned_and_the_rest_says_why_not() -> None:
    images = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    made = nbkit.plan(Convolutions(), example=images, loss=F.cross_entropy, batch=64, on="4 V100")
    assert {Strategy.parse(row.strategy, 4).tp for row in made.rows} == {1}
    assert {"dp=4", "dp=4 zero=1", "dp=4 zero=3"} <= {row.strategy for row in made.rows}
    why = next(one for one in made.refused if one.strategy == "tp=4")
    assert why.why.startswith("nbkit knows the messages only of transformer blocks")


def test_what_cannot_be_planned_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="without example= and loss="):
        nbkit.plan(GPT(CONFIG), batch=8, on="4 A100")
    with pytest.raises(UsageError, match="this is a str"):
        nbkit.plan("gpt2", batch=8, on="4 A100")
    names = {"model": lambda: GPT(CONFIG), "rows": BATCH}
    with pytest.raises(UsageError, match="no variable 'lost'"):
        planned(names, model="model", example="rows", loss="lost", batch=8, on="2 A100", precision="fp32", why=None)
    monkeypatch.setattr(model_pieces, "LARGEST", 1000)
    with pytest.raises(UsageError, match="too large to be run here"):
        nbkit.plan(GPT(CONFIG), example=BATCH, loss=loss, batch=8, on="4 A100")


IN_A_KERNEL = """
import sys, nbkit
from nbkit.notebook.planning import in_a_fork

def build():
    import torch
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def example():
    import torch
    return torch.ones(2, 4), torch.zeros(2, dtype=torch.long)

def loss(output, target):
    return sys.modules["torch"].nn.functional.cross_entropy(output, target)

from nbkit.notebook.planning import PlanningLine
said = []
PlanningLine.say = lambda line, what: said.append(what)
made = nbkit.plan(build, example=example, loss=loss, batch=8, on="2 A100")
assert "runs two rows of the model" in said and said[-1].startswith("measures it"), said
assert made.model == "Sequential of 58 parameters" and made.rows and "torch" not in sys.modules
def broken(say): raise ValueError("no such model")

try:
    in_a_fork(broken, heard=print)
except ValueError as error:
    print(error, error.__notes__[0].count("in broken"))
"""


@pytest.mark.long
def test_a_callable_is_looked_at_in_a_process_of_its_own_where_there_is_no_torch_yet() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "no such model 1\n"), done.stderr


def test_an_operation_that_fails_on_shapes_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with trace_model._without_memory(), pytest.raises(RuntimeError):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert caplog.records == []
