"""Test that the formulas predict what telemetry counts: the traffic of a step by operation and axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.estimate.time_model import _flow
from nbkit.rank.train.trainer import Trainer
from nbkit.records.events import Switched
from nbkit.strategy import Strategy

pytestmark = pytest.mark.usefixtures("known_to_be_right")

# Each axis, alone or with another.
THROUGH = (
    "dp=2 tp=2 zero=1",
    "tp=2 pp=2 schedule=zbv microbatches=4",
    "cp=4",
    "hsdp",
)


def trainer(**changed: Any) -> Trainer:
    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randint(32, (8,), generator=draw) for _ in range(2)) for _ in range(32)]
    asked: dict[str, Any] = {
        "model": lambda: GPT(GPTConfig(vocab=32, block=8, layers=4, heads=4, width=16)),
        "loss": lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": data,
        "batch_size": 8,
        "compute": nbkit.Compute(grad_norm_every=1000),
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def sent_in_a_step(job: Trainer) -> dict[tuple[str, str], tuple[float, float]]:
    """Return {(operation, axis): (calls, bytes)} of a step: two steps minus one, so messages of a run do not count.

    The empty messages of a pipeline's barrier are left out.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for steps, sign in ((1, -1.0), (2, 1.0)):
        began = collectives.ring.end
        job.fit(steps)
        for call in collectives.ring.between(began, collectives.ring.end)[0]:
            if call.peer is not None and not call.bytes:
                continue
            into = found.setdefault((call.op, call.axis), [0.0, 0.0])
            into[0] += sign
            into[1] += sign * call.bytes
    return {key: (calls, size) for key, (calls, size) in found.items() if key[0] != "recv" and key[1] != "world"}


def through_all(world: Any) -> list[dict[str, Any]]:
    collectives.set_mode("count")
    job = trainer()
    job.fit(1)
    said = []
    for text in THROUGH:
        job.switch(text)
        job.fit(1)
        now = job.job.strategy
        predicted = job.job.cost_model().of_all_ranks(now)
        said.append({"strategy": str(now), "sent": sent_in_a_step(job), "predicted": predicted})
    return said


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
def test_predicted_bytes_of_every_operation_and_axis_equal_measured_ones() -> None:
    said = run_ranks(through_all, 4, timeout=200)

    for place, text in enumerate(THROUGH):
        predicted = {(term.op, term.axis): term for term in said[0][place]["predicted"]}
        measured: dict[tuple[str, str], list[float]] = {}
        for rank in said:
            for key, (calls, size) in rank[place]["sent"].items():
                into = measured.setdefault(key, [0.0, 0.0])
                into[0] += calls / len(said)
                into[1] += size
        assert sorted(measured) == sorted(predicted), text
        for (op, axis), (calls, size) in measured.items():
            # A canary and counts are sent with gradients and parameters, and the parts of 53 small tensors begin at
            # multiples of 16 bytes in each rank's row.
            rest = 4 * 4 * 16 * 53 if axis in ("dp", "shard", "replicate") else 0
            assert 0 <= size - predicted[op, axis].bytes <= rest, (text, op, axis)
            if axis in ("tp", "pp"):
                assert calls == predicted[op, axis].calls, (text, op, axis)


class TwoMaps(nn.Module):
    """A chain of blocks that is no transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def unknown(world: Any) -> dict[str, bool]:
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, generator=draw), torch.randn(6, generator=draw)) for _ in range(32)]
    job = trainer(model=TwoMaps, loss=F.mse_loss, data=data)
    job.fit(1)
    strategies = {text: Strategy.parse(text, 2) for text in ("ddp", "zero3", "tp", "pp", "cp=2")}
    job.job.builder.finder.sync(list(strategies.values()))
    seen = job.job.cost_model()
    return {text: bool(seen.terms(strategy)) for text, strategy in strategies.items()}


def test_only_the_data_axis_is_predicted_for_other_models_than_transformers() -> None:
    assert run_ranks(unknown, 2)[0] == {"ddp": True, "zero3": True, "tp": False, "pp": False, "cp=2": False}


def test_a_switch_on_another_number_of_ranks_predicts_no_flow() -> None:
    before_a_resize = Switched(1, old="dp=8 ep=8", new="ddp")
    assert _flow(None, before_a_resize, 4) is None  # type: ignore[arg-type]
