"""Test that all ranks together measure the link between them once, and get the same figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from nbkit.planner.link_speed import OperationSpeed, WorldLinks
from nbkit.planner.traffic import TrafficTerm
from nbkit.rank.comm import link_probe
from nbkit.rank.telemetry import collectives


def measured(world: Any, forgets: int) -> dict[str, Any]:
    collectives.set_mode("count")
    link_probe._known = None
    first = link_probe.link_of(torch.device("cpu"))
    calls = collectives.ring.end
    again = link_probe.link_of(torch.device("cpu"))
    known = collectives.ring.end - calls
    if world.place.rank == forgets:
        link_probe._known = None  # like a process that joined later
    calls = collectives.ring.end
    link_probe.link_of(torch.device("cpu"))
    return {"link": first, "same": again is first, "known": known, "forgotten": collectives.ring.end - calls}


def test_the_link_is_measured_once_and_equal_on_all_ranks() -> None:
    said = run_ranks(measured, 3, 1, timeout=120)

    assert said[0]["link"] == said[1]["link"] == said[2]["link"]
    found: WorldLinks = said[0]["link"]
    assert set(found.ways) == {"all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"}
    assert all(way.latency > 0 and way.speed > 0 for way in found.ways.values()) and found.copy > 0
    assert found.node_of == (0, 0, 0) and found.far is None
    # If all know the link, only the question is sent. If one has forgotten it, all measure.
    assert all(one["same"] and one["known"] <= 2 for one in said)
    assert all(one["forgotten"] > 20 for one in said)


def test_a_rank_sends_to_the_rank_of_the_same_place_on_the_next_node() -> None:
    def ends(*node_of: int) -> list[tuple[list[int], list[int]]]:
        both = (link_probe._neighbours(node_of, rank) for rank in range(len(node_of)))
        return [([i for i, to in enumerate(out) if to], [i for i, of in enumerate(into) if of]) for out, into in both]

    assert ends(0, 0, 1, 1) == [([2], [2]), ([3], [3]), ([0], [0]), ([1], [1])]
    assert ends(0, 1, 2) == [([1], [2]), ([2], [0]), ([0], [1])]
    assert ends(0, 0, 1) == [([2], [2]), ([2], []), ([0], [0, 1])]


def test_a_world_of_one_has_no_link() -> None:
    assert run_ranks(measured, 1, 0)[0]["link"] is None


def made(**changed: Any) -> WorldLinks:
    ways = dict.fromkeys(
        ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"), OperationSpeed(1e-3, 1e9)
    )
    asked: dict[str, Any] = {"ranks": 4, "ways": ways, "near": None, "far": None, "copy": 1e10, "node_of": (0,) * 4}
    return WorldLinks(**{**asked, "crowded": False, **changed})


def test_predicted_seconds_are_latency_plus_bytes_by_speed() -> None:
    all_reduce = TrafficTerm("dp", "all_reduce", 4, 2, 10**9, "gradients")

    def took(link: WorldLinks, **how: bool) -> float:
        return link.way(all_reduce, **how).seconds(all_reduce.calls, all_reduce.wire)

    assert took(made()) == pytest.approx(2e-3 + 1.5)
    # An operation over all ranks has the speed and latency between nodes. Neighbours share the link of their node.
    nodes = made(near=OperationSpeed(1e-4, 1e10), far=OperationSpeed(1e-3, 5e8), node_of=(0, 0, 1, 1))
    assert took(nodes, spans_nodes=True) == pytest.approx(2e-3 + 1.5)
    assert took(nodes, spans_nodes=True, apart=True) == pytest.approx(2e-3 + 3)
    assert took(nodes) == pytest.approx(2e-4 + 0.15)
    slow = made(near=OperationSpeed(2e-3, 1e10), far=OperationSpeed(1e-3, 5e8), node_of=(0, 0, 1, 1))
    assert took(slow) == pytest.approx(2e-3 + 0.15)  # within a node no operation takes longer than between nodes
    assert made().moving([10**9, 0], [0, 5 * 10**8], [10**10, 0]) == pytest.approx(1e-3 + 1 + 0.2 + 1)
    assert made().moving([0], [0], [0]) == 0


def test_latency_of_fewer_ranks_is_between_one_message_and_all_ranks() -> None:
    pair = TrafficTerm("tp", "all_reduce", 2, 1, 4, "")
    ring = {**made().ways, "all_reduce": OperationSpeed(3e-3, 1e9, 2e-3)}
    assert made(ways=ring).way(pair) == OperationSpeed(1e-3, 1e9, 1e-3)  # a message alone takes 1 ms
    assert made(ways=ring).way(replace(pair, ranks=3)) == OperationSpeed(2e-3, 1e9, 2e-3)
    assert made().way(pair) == OperationSpeed(1e-3, 1e9)  # through a switch, the number of ranks does not matter


@pytest.mark.parametrize(
    ("units", "each", "crowded"),
    [
        ([("GPU-a",), ("GPU-b",)], 1, False),
        ([("GPU-a",), ("GPU-a",)], 1, True),
        ([(0, 1), (2, 3)], 2, False),
        ([(0, 1, 2, 3), (0, 1, 2, 3)], 2, False),
        ([(0,), (1,)], 2, True),
        ([None, (1,)], 1, True),
    ],
)
def test_ranks_that_share_a_gpu_or_cores_are_found(units: Any, each: int, crowded: bool) -> None:
    assert link_probe._crowded(["here", "here"], units, each=each) is crowded
