"""Test that on several nodes, hsdp shards and tp splits within a node, and formulas predict traffic between nodes.

The ranks of one machine give three host names, as if two ranks ran on each of three nodes.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.mesh import BETWEEN
from nbkit.planner.link_speed import ranks_of_node
from nbkit.planner.traffic import TrafficTerm, wire_bytes
from nbkit.rank.comm import link_probe
from nbkit.rank.telemetry import collectives
from nbkit.strategy import Strategy

pytestmark = pytest.mark.usefixtures("known_to_be_right")
EACH = 2
WIDTH = 64


def trainer(strategy: str) -> nbkit.Trainer:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))
    return nbkit.Trainer(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        loss=F.mse_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[(x[i], x[i].tanh()) for i in range(48)],
        batch_size=12,
        strategy=strategy,
        log_dir=None,
        progress=False,
    )


def on_nodes(world: Any, strategy: str, axis: str) -> dict[str, Any]:
    rank = world.place.rank
    socket.gethostname = lambda: f"node{rank // EACH}"  # type: ignore[attr-defined]
    link_probe._known = None  # measure the link here, instead of the value that tests give
    collectives.set_mode("count")
    job = trainer(strategy)
    began, losses = str(job.job.strategy), [record["loss"] for record in job.fit(2)]
    first = collectives.ring.end
    job.fit(1)
    calls = [call for call in collectives.ring.between(first, collectives.ring.end)[0] if call.axis != "world"]
    between = [call for call in calls if len({member // EACH for member in call.group.members}) > 1]
    terms = job.job.cost_model().terms(job.job.strategy)

    def spans(term: TrafficTerm) -> bool:
        return axis == "replicate" or term.level == BETWEEN

    return {
        "began": began,
        "losses": losses,
        "axes": {call.axis for call in between},
        "within": {call.axis for call in calls} - {call.axis for call in between},
        # An all-reduce of S bytes over n ranks sends 2(n-1)/n S.
        "bytes": sum(2 * (n - 1) / n * call.bytes for call in between for n in [len(call.group.members)]),
        "formula": max(wire_bytes([term for term in own if term.axis == axis and spans(term)]) for own in terms),
        "tp": job.switch("tp").new,
        "link": str(job.job.builder.link),
    }


def alone(world: Any) -> list[float]:
    return [record["loss"] for record in trainer("ddp").fit(2)]


@pytest.mark.long
def test_shards_stay_within_a_node_and_traffic_between_nodes_equals_the_formula() -> None:
    said = run_ranks(on_nodes, 6, "hsdp", "replicate", timeout=240)
    (expected,) = run_ranks(alone, 1)
    for one in said:
        assert one["began"] == "dp=6 zero=3 shard=2"
        assert one["losses"] == pytest.approx(expected, abs=1e-10)
        assert one["axes"] == {"replicate"} and "shard" in one["within"]
        assert one["tp"] == "dp=3 tp=2"
        assert "within a node" in one["link"] and "between nodes" in one["link"]
    sent = max(one["bytes"] for one in said)
    assert 0 < said[0]["formula"] <= sent < 1.01 * said[0]["formula"]  # formulas leave out padding


@pytest.mark.long
def test_ddp_sums_in_two_levels_with_the_predicted_traffic_between_nodes() -> None:
    said = run_ranks(on_nodes, 4, "ddp", "dp", timeout=240)
    (expected,) = run_ranks(alone, 1)
    for one in said:
        assert one["losses"] == pytest.approx(expected, abs=1e-12)
        assert one["axes"] == {"dp"} and not one["within"]
    sent = max(one["bytes"] for one in said)
    assert 0 < said[0]["formula"] <= sent < 1.02 * said[0]["formula"]  # formulas leave out counts and padding
    # The two ranks of a node together send 1 x the gradients to the other node. One ring would send 1.5 x.
    assert 2 * said[0]["formula"] == 8 * 2 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("text", "node", "means"),
    [
        ("hsdp", 2, "dp=6 zero=3 shard=2"),
        ("hsdp", None, "dp=6 zero=3 shard=3"),
        ("tp", 2, "dp=3 tp=2"),
        ("tp", 4, "dp=3 tp=2"),
        ("hsdp", 4, "dp=6 zero=3 shard=2"),
        ("tp", None, "tp=6"),
        ("tp=6", 2, "tp=6"),
        ("tp dp=1", 2, "tp=6"),
        ("tp cp=3", 6, "tp=2 cp=3"),
        ("tp pp=2", 2, "tp=3 pp=2 schedule=1f1b microbatches=4"),
        ("tp", 1, "tp=6"),
    ],
)
def test_a_preset_stays_within_a_node_unless_more_is_typed(text: str, node: int | None, means: str) -> None:
    assert str(Strategy.parse(text, 6, node=node)) == means


def test_ranks_of_node_is_the_number_that_divides_every_node() -> None:
    assert ranks_of_node((0, 0, 0, 0)) is None and ranks_of_node(()) is None
    assert ranks_of_node((0, 0, 1, 1)) == 2
    assert ranks_of_node((0, 0, 0, 0, 1, 1)) == 2  # for unequal nodes, a number that divides each
