"""Test that `order=` sets which axis crosses nodes, and so their bytes. Without it, the speeds of links decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformer_weights import transformer

from nbkit.errors import StrategyError
from nbkit.mesh import WITHIN
from nbkit.planner.exchange import orders, placed
from nbkit.planner.job_facts import Facts
from nbkit.planner.link_speed import OperationSpeed, WorldLinks, between_nodes
from nbkit.planner.step import link_seconds
from nbkit.planner.traffic import per_step
from nbkit.strategy import Strategy

NODES = (0, 0, 1, 1)
WEIGHTS = transformer(blocks=4, width=64, vocab=128)
FACTS = Facts(heads=4, kv_heads=4, width=64, vocab=128, blocks=4, sequence=32, batch=16)
WAYS = dict.fromkeys(("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"), OperationSpeed(0.0, 1e8))
LINK = WorldLinks(4, WAYS, OperationSpeed(0.0, 1e9), OperationSpeed(0.0, 1e8), 1e10, NODES, crowded=False)


def crossing(text: str, batch: int = 16) -> float:
    strategy, facts = Strategy.parse(text, 4), Facts(**{**vars(FACTS), "batch": batch})
    every = (per_step(WEIGHTS, facts, strategy, rank, node_of=NODES) for rank in range(4))
    return sum(between_nodes(terms, strategy, rank, NODES) for rank, terms in enumerate(every))


def test_the_axis_of_order_is_the_slowest_and_part_of_the_spelling() -> None:
    usual, other = Strategy.parse("pp=2", 4), Strategy.parse("pp=2 order=dp", 4)
    assert usual.mesh.groups("dp") == [(0, 1), (2, 3)] and usual.mesh.groups("pp") == [(0, 2), (1, 3)]
    assert other.mesh.groups("dp") == [(0, 2), (1, 3)] and other.mesh.groups("pp") == [(0, 1), (2, 3)]
    assert str(other) == "dp=2 pp=2 schedule=1f1b microbatches=4 order=dp"
    assert Strategy.parse(str(other), 4) == other and other.composed == usual != other
    # A given order stays. Only the default order may change.
    assert str(Strategy.parse("pp=2 order=pp", 4)).endswith("order=pp")
    assert orders(Strategy.parse("pp=2 order=pp", 4)) == [Strategy.parse("pp=2 order=pp", 4)]
    assert [order.slowest for order in orders(usual, one_node=False)] == ["", "dp"]


@pytest.mark.parametrize(("text", "why"), [("ddp order=dp", "no other axis"), ("pp=2 order=tp", "tp is 1")])
def test_an_order_without_effect_is_reported(text: str, why: str) -> None:
    found = Strategy.parse(text, 4)
    assert found.order == "" and why in found.without_effect[0]


def test_an_order_that_is_no_axis_is_refused() -> None:
    with pytest.raises(StrategyError, match="not an axis") as raised:
        Strategy.parse("pp=2 order=nodes", 4)
    Strategy.parse(f"pp=2 {raised.value.hint}", 4)


def test_the_bytes_between_nodes_are_those_of_the_axis_across_them() -> None:
    element, rows, hidden = 4, 16, 32 * 64
    # Between two stages, the hidden states of every row go one way, and their gradients the other.
    assert crossing("pp=2 order=pp") == 2 * rows * hidden * element
    gradients = element * sum(weight.numel for weight in WEIGHTS)
    # Each stage has one rank on each of two nodes, and each of these sends 2 (k - 1) / k of the stage's gradients.
    assert crossing("pp=2 order=dp") == 2 * gradients
    assert crossing("ddp") == 2 * gradients  # in two levels
    # In one ring over four ranks, two ranks send to the other node.
    assert crossing("zero1") == 2 * 1.5 * gradients


@pytest.mark.parametrize(("batch", "crosses"), [(16, ""), (4096, "dp")])
def test_by_default_the_axis_with_the_shortest_link_time_crosses_nodes(batch: int, crosses: str) -> None:
    facts = Facts(**{**vars(FACTS), "batch": batch})

    def took(order: Strategy) -> float:
        return link_seconds(order, per_step(WEIGHTS, facts, order, 0, node_of=NODES), LINK)

    assert placed(Strategy.parse("pp=2", 4), took, one_node=False).slowest == crosses


def test_ranks_that_all_send_to_other_nodes_share_the_link() -> None:
    shared = replace(
        LINK, ways=dict.fromkeys(WAYS, OperationSpeed(0.0, 2e8))
    )  # in a ring, one rank of a node sends to others
    for text, speed in (("ddp", 1e8), ("dp=2 tp=2", 1e8), ("zero3", 2e8)):
        strategy = Strategy.parse(text, 4)
        every = per_step(WEIGHTS, FACTS, strategy, 0, node_of=NODES)
        terms = [term for term in every if term.axis == "dp" and term.level != WITHIN]
        assert terms and link_seconds(strategy, terms, shared) == pytest.approx(sum(one.wire for one in terms) / speed)
