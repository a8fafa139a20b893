"""Settings that change where and how a step is computed do not change its result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.module.compile import not_compiled
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.step import optimizer_state as offloading
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy
from verify.models.specimens import ZOO, gpt

pytestmark = pytest.mark.usefixtures("known_to_be_right")


def trainer(**changed: Any) -> Trainer:
    ids, target = ZOO["gpt"].batch(16)
    asked: dict[str, Any] = {
        "model": lambda: gpt(2).double(),
        "loss": ZOO["gpt"].loss,
        "optimizer": two_groups,
        "data": list(zip(ids, target, strict=True)),
        "batch_size": 4,
        "seed": 5,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups: list[list[Tensor]] = [[p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2)


class Own(torch.optim.SGD):
    """An optimizer of somebody's own."""


def said(**changed: Any) -> tuple[Trainer, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(**changed)
    return made, " ".join(str(warning.message) for warning in caught)


def offloaded(world: Any) -> dict[str, Any]:
    offloading.PART_BYTES = 1 << 12
    update, found = torch.optim.AdamW.step, {}
    updated: list[int] = []

    def counting(self: Any, closure: Any = None) -> Any:
        if step_boundary.training() is not None:  # not of copies, which are tried before the training runs
            updated.append(sum(len(group["params"]) for group in self.param_groups))
        return update(self)

    torch.optim.AdamW.step = counting  # type: ignore[method-assign]
    for place in (None, "cpu"):
        job, warned = said(strategy="zero1", compute=nbkit.Compute(offload=place))
        updated.clear()
        job.fit(3)
        parts = len(updated), sum(updated)
        job.switch("tp")
        job.fit(2)
        found[place] = parts, [record["loss"] for record in job.history], warned
    with pytest.raises(TrainingError) as raised:
        trainer(compute=nbkit.Compute(offload="cpu"), optimizer=lambda model: Own(model.parameters(), lr=0.1))
    return {**found, "no": str(raised.value)}


@pytest.mark.long
def test_an_optimizer_that_is_offloaded_updates_in_parts_and_as_ever() -> None:
    for found in run_ranks(offloaded, 2, timeout=170):
        (calls, every), losses, _ = found[None]
        (parts, together), the_same, warned = found["cpu"]
        assert calls == 3 and parts > 6 and together == every
        assert losses == the_same and len(losses) == 5
        assert "offload= has no effect on CPU ranks" in warned
        assert "Own may need all of them" in found["no"]


def compiled(world: Any, strategy: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    losses, layers = {}, 2 if "pp" in strategy else 1  # each block is compiled by itself
    for how in (False, "aot_eager"):
        job = trainer(model=lambda: gpt(layers).double(), strategy=strategy, compute=nbkit.Compute(compile=how))
        job.fit(2)
        losses[how] = [record["loss"] for record in job.history]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    job.switch("tp")
    job.fit(1)
    split = not_compiled(JobOptions(compile=True), Strategy.parse("pp schedule=zb", 2))
    _, under_tp = said(strategy="tp", compute=nbkit.Compute(compile=True))
    _, dropping = said(model=lambda: gpt(2, dropout=0.1).double(), compute=nbkit.Compute(compile=True))
    return {"losses": losses, "graphs": graphs, "breaks": breaks, "split": split, "tp": under_tp, "dropping": dropping}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero3", "pp"])
def test_blocks_are_compiled_where_that_is_sound_and_where_not_it_is_said(strategy: str) -> None:
    for found in run_ranks(compiled, 2, strategy, timeout=170):
        assert found["losses"]["aot_eager"] == pytest.approx(found["losses"][False], abs=1e-10)
        assert found["graphs"] > 0 and found["breaks"] <= 2
        assert "compile= has no effect under tp=2, whose layers hold collectives" in found["tp"]
        assert "in halves" in found["split"]
        assert "compile= has no effect with dropout" in found["dropping"]


@pytest.mark.parametrize(
    ("strategy", "ranks", "why"),
    [
        *(("zero3", 2, ""), ("ddp", 2, ""), ("pp", 2, ""), ("pp schedule=interleaved", 2, "")),
        *(("tp", 2, "hold collectives"), ("cp=2", 2, "hold collectives"), ("dp=2 tp=2", 4, "hold collectives")),
        *(("pp schedule=zb", 2, "in halves"), ("pp schedule=zbv", 2, "in halves")),
    ],
)
def test_the_reason_is_that_of_the_strategy(strategy: str, ranks: int, why: str) -> None:
    said = not_compiled(JobOptions(compile=True), Strategy.parse(strategy, ranks))

    assert (why in said and "under " in said) if why else said == ""
    assert "recompute=True" in not_compiled(JobOptions(compile=True, recompute=True), Strategy.parse(strategy, ranks))
