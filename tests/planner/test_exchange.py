"""Test that the plan of a switch moves exactly the missing elements, from ranks that hold them, in bounded rounds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from rounds_in_place import peaks

from nbkit.errors import TrainingError
from nbkit.mesh import Mesh
from nbkit.planner.exchange import ExchangePlan, orders, placed
from nbkit.planner.exchange_rounds import rounds, steps
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Box, Layout

Side = list[dict[str, Layout]]
WIDTH, LAYERS, VOCABULARY = 512, 12, 8192


def transformer(prefix: str = "") -> list[tuple[str, tuple[int, ...], int | None, int]]:
    """Return (name, shape, dim that tp cuts, layer) of each weight; -1 is before the layers, LAYERS is after them."""
    weights: list[tuple[str, tuple[int, ...], int | None, int]] = [("tokens", (VOCABULARY, WIDTH), 0, -1)]
    for layer in range(LAYERS):
        for name, shape, dim in (
            ("qkv", (3 * WIDTH, WIDTH), 0),
            ("out", (WIDTH, WIDTH), 1),
            ("up", (4 * WIDTH, WIDTH), 0),
            ("down", (WIDTH, 4 * WIDTH), 1),
            ("norm", (WIDTH,), None),
        ):
            weights.append((f"{layer}.{name}", shape, dim, layer))
    return [*weights, ("head", (VOCABULARY, WIDTH), 0, LAYERS)]


def side(mesh: Mesh, zero: int = 0) -> Side:
    """Return what each rank holds of the transformer and of its two moments."""
    found: Side = []
    for rank in range(mesh.size):
        at, holding = mesh.index(rank), {}
        for name, shape, dim, layer in transformer():
            stage = min(max(layer, 0) * mesh.pp // LAYERS, mesh.pp - 1)
            if stage != at["pp"]:
                continue
            cut = Layout.whole(shape) if dim is None else Layout.whole(shape).part(dim, mesh.tp, at["tp"])
            shard = cut.part(0, mesh.dp, at["dp"])
            holding[f"weight/{name}"] = shard if zero == 3 else cut
            for moment in ("exp_avg", "exp_avg_sq"):
                holding[f"{moment}/{name}"] = shard if zero else cut
        found.append(holding)
    return found


STRATEGIES = {
    "ddp": side(Mesh(dp=4)),
    "zero1": side(Mesh(dp=4), 1),
    "zero3": side(Mesh(dp=4), 3),
    "tp": side(Mesh(tp=4)),
    "pp": side(Mesh(pp=4)),
    "dp=2 tp=2": side(Mesh(dp=2, tp=2)),
    "dp=2 pp=2": side(Mesh(dp=2, pp=2)),
    "tp=2 pp=2": side(Mesh(tp=2, pp=2)),
}
PAIRS = list(itertools.permutations(STRATEGIES, 2))


def sizes(*sides: Side) -> dict[str, int]:
    return {key: 4 for each in sides for holding in each for key in holding}


def plan(old: str, new: str) -> ExchangePlan:
    return ExchangePlan.of(STRATEGIES[old], STRATEGIES[new], sizes(STRATEGIES[old]))


def bytes_of(holding: dict[str, Layout]) -> int:
    return 4 * sum(layout.numel for layout in holding.values())


def painted(layout: Layout | None, shape: tuple[int, ...]) -> np.ndarray:
    held = np.zeros(shape, dtype=bool)
    for _, box in () if layout is None else layout.pieces:
        held[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = True
    return held


def lacking(old: Side, new: Side, itemsize: dict[str, int]) -> list[int]:
    """Return the lower bound, counted element by element: for each rank, the bytes that it needs and lacks."""
    found = []
    for before, after in zip(old, new, strict=True):
        bits = 0
        for key, layout in after.items():
            missing = painted(layout, layout.shape) & ~painted(before.get(key), layout.shape)
            bits += int(missing.sum()) * itemsize[key]
        found.append(bits)
    return found


def scattered(shape: tuple[int, ...], ranks: int, draw: random.Random) -> list[Layout | None]:
    """Draw a layout for each rank. Together the ranks hold the whole tensor."""
    whole, dim = Layout.whole(shape), draw.randrange(len(shape)) if shape else 0
    ways = ["whole", "owner"] + ["cut", "packed", "uneven", "squares", "mixed"] * bool(shape)
    way = draw.choice(ways)
    if way == "whole":
        return [whole] * ranks
    if way == "owner":
        owners = draw.sample(range(ranks), draw.randint(1, ranks))
        return [whole if rank in owners else None for rank in range(ranks)]
    if way == "cut":
        return [whole.part(dim, ranks, rank) for rank in range(ranks)]
    if way == "packed":
        half = shape[dim] // 2
        each = [
            [(r * half // ranks, (r + 1) * half // ranks), (half + r * half // ranks, half + (r + 1) * half // ranks)]
            for r in range(ranks)
        ]
        each[-1][1] = (each[-1][1][0], shape[dim])
        return [Layout.of_ranges(shape, dim, ranges) for ranges in each]
    if way == "uneven":
        cuts = sorted(draw.randint(0, shape[dim]) for _ in range(ranks - 1))
        edges = [0, *cuts, shape[dim]]
        return [whole.cut(dim, edges[rank], edges[rank + 1]) for rank in range(ranks)]
    if way == "squares":
        return [whole.part(0, 2, rank // 2).part(len(shape) - 1, ranks // 2, rank % 2) for rank in range(ranks)]
    found: list[Layout | None] = []
    for _ in range(ranks):
        start = draw.randint(0, shape[dim] - 1)
        found.append(whole.cut(dim, start, draw.randint(start, shape[dim])))
    found[draw.randrange(ranks)] = whole
    return found


def scattered_sides(seed: int, ranks: int = 4) -> tuple[Side, Side, dict[str, int]]:
    """Draw two sides that hold every tensor, and the bytes of an element of each tensor."""
    draw = random.Random(seed)
    old: Side = [{} for _ in range(ranks)]
    new: Side = [{} for _ in range(ranks)]
    itemsize = {}
    for number in range(24):
        shape = draw.choice([(8, 12), (7, 5), (3, 4, 5), (16,), (1, 9), (), (2, 2, 2, 3)])
        itemsize[f"tensor{number}"] = draw.choice([1, 2, 4, 8])
        for which in (old, new):
            for rank, layout in enumerate(scattered(shape, ranks, draw)):
                if layout is not None:
                    which[rank][f"tensor{number}"] = layout
    return old, new, itemsize


@pytest.mark.parametrize("seed", range(12))
def test_ranks_receive_exactly_the_missing_elements_from_ranks_that_hold_them(seed: int) -> None:
    old, new, itemsize = scattered_sides(seed)

    made = ExchangePlan.of(old, new, itemsize)

    assert list(made.bytes) == lacking(old, new, itemsize)
    assert sum(made.sent) == made.total_bytes == sum(made.pairs.values())
    got = {
        (rank, key): painted(old[rank].get(key), layout.shape)
        for rank, h in enumerate(new)
        for key, layout in h.items()
    }
    for src, dst in itertools.permutations(range(4), 2):
        for key, box in made.moves(src, dst):
            window = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert painted(old[src].get(key), box_shape(old, key))[window].all()
            assert not got[dst, key][window].any(), "sent twice, or held already"
            got[dst, key][window] = True
    for (rank, key), have in got.items():
        assert have[painted(new[rank][key], have.shape)].all()


def box_shape(sides: Side, key: str) -> tuple[int, ...]:
    return next(holding[key].shape for holding in sides if key in holding)


@pytest.mark.parametrize("seed", range(6))
def test_every_rank_computes_the_same_plan(seed: int) -> None:
    old, new, itemsize = scattered_sides(seed)
    shuffled = dict(random.Random(seed).sample(list(itemsize.items()), len(itemsize)))
    backwards = [dict(reversed(holding.items())) for holding in new]

    made, again = ExchangePlan.of(old, new, itemsize), ExchangePlan.of(old, backwards, shuffled)

    assert made.groups == again.groups
    assert rounds(made, limit=64) == rounds(again, limit=64)


def test_the_total_bytes_equal_the_published_formulas() -> None:
    state = bytes_of(STRATEGIES["ddp"][0])

    assert plan("zero3", "ddp").total_bytes == 3 * state
    assert plan("zero1", "ddp").total_bytes == 3 * state * 2 // 3
    assert plan("pp", "ddp").total_bytes == 3 * state
    assert plan("zero3", "pp").total_bytes == state * 3 // 4
    assert [pair for pair in PAIRS if plan(*pair).total_bytes == 0] == [
        *[("ddp", new) for new in STRATEGIES if new != "ddp"],
        ("zero1", "zero3"),
        ("dp=2 tp=2", "tp=2 pp=2"),
        ("dp=2 pp=2", "pp"),
        ("dp=2 pp=2", "tp=2 pp=2"),
    ]


def test_tensors_with_equal_layouts_are_planned_once() -> None:
    assert len(transformer()) * 3 == 186
    assert len(plan("zero3", "tp").groups) < 10


@pytest.mark.parametrize("pair", [("dp=2 pp=2", "ddp"), ("dp=2 tp=2", "ddp"), ("dp=2 pp=2", "zero3")])
def test_ranks_that_hold_the_same_tensors_send_equal_shares(pair: tuple[str, str]) -> None:
    made = plan(*pair)

    assert max(made.sent) <= 1.03 * sum(made.sent) / 4


def test_part_of_a_box_comes_from_the_rank_that_sends_less() -> None:
    whole = Layout.whole((4, 4))
    old: Side = [{"a": whole, "b": whole}, {"a": whole.cut(0, 0, 2)}, {}]

    made = ExchangePlan.of(old, [{}, {}, {"a": whole, "b": whole}], {"a": 4, "b": 4})

    assert made.pairs == {(0, 2): 96, (1, 2): 32}


def test_an_element_that_no_rank_holds_is_refused_with_its_name() -> None:
    whole = Layout.whole((4, 6))

    with pytest.raises(TrainingError, match=r"a\[2:4, 0:6\] for rank 1") as error:
        ExchangePlan.of([{"a": whole.cut(0, 0, 2)}, {}], [{}, {"a": whole}], {"a": 4})
    assert "0:2" not in str(error.value)
    with pytest.raises(TrainingError, match=r"b\[0:4, 0:6\] for rank 0"):
        ExchangePlan.of([{"a": whole}, {}], [{"b": whole}, {}], {"a": 4, "b": 4})


def test_different_shapes_and_a_layout_with_a_gap_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"\(4, 4\) and \(4, 5\)"):
        ExchangePlan.of([{"a": Layout.whole((4, 4))}], [{"a": Layout.whole((4, 5))}], {"a": 4})
    whole = Layout.whole((4, 4))
    with pytest.raises(TrainingError, match="belong to no part"):
        ExchangePlan.of([{"a": whole}], [{"a": replace(whole, pieces=whole.cut(0, 0, 2).pieces)}], {"a": 4})


def test_an_exchange_that_leaves_a_gap_is_refused_before_it_begins() -> None:
    made = plan("zero3", "ddp")
    broken = replace(made, groups=(replace(made.groups[0], moves=made.groups[0].moves[1:]), *made.groups[1:]))
    receiver = made.groups[0].moves[0].dst

    with pytest.raises(TrainingError, match=made.groups[0].keys[0]):
        steps(broken, rounds(broken, limit=1 << 20), receiver)


@pytest.mark.parametrize("in_place", [None, 1 << 20])
@pytest.mark.parametrize("pair", [("zero3", "ddp"), ("pp", "dp=2 tp=2"), ("tp", "zero1")])
def test_rounds_stay_within_their_limit_and_make_every_move_once(pair: tuple[str, str], in_place: int | None) -> None:
    made, limit = plan(*pair), 1 << 20
    sent, closed = dict.fromkeys(itertools.permutations(range(4), 2), 0), []

    for each in rounds(made, limit=limit, in_place=in_place):
        out, into = [0] * 4, [0] * 4
        for keys, moves, _ in each.parts:
            assert not set(keys) & set(closed)
            for src, dst, box in moves:
                moved = box.numel * 4 * len(keys)
                out[src], into[dst] = out[src] + moved, into[dst] + moved
                sent[src, dst] += moved
        assert max(out + into) <= limit
        assert each.num_bytes == sum(out)
        closed += each.closes

    assert {pair: moved for pair, moved in sent.items() if moved} == made.pairs
    assert sorted(closed) == sorted(sizes(STRATEGIES["ddp"]))


@pytest.mark.parametrize("old", STRATEGIES)
def test_a_switch_in_place_holds_little_more_than_the_larger_side(old: str) -> None:
    for new in STRATEGIES:
        made = plan(old, new)
        extra = [
            most - max(bytes_of(before), bytes_of(after))
            for most, before, after in zip(
                peaks(made, rounds(made, limit=8 << 20, in_place=8 << 20)), made.old, made.new, strict=True
            )
        ]
        # The limit includes two buffers of 8 MB.
        assert max(extra) <= 48 << 20, f"{old} -> {new}: {max(extra) >> 20} MB"


def test_the_reversed_exchange_restores_the_old_layouts() -> None:
    made = plan("pp", "tp")
    keys = [key for key in sizes(STRATEGIES["ddp"]) if "up" in key]

    back = made.reversed(keys)

    assert back.old == tuple({k: v for k, v in holding.items() if "up" in k} for holding in made.new)
    assert back.total_bytes == sum(
        lacking(
            [{k: v for k, v in holding.items() if k in keys} for holding in STRATEGIES["tp"]],
            [{k: v for k, v in holding.items() if k in keys} for holding in STRATEGIES["pp"]],
            sizes(STRATEGIES["pp"]),
        )
    )


def total(old: Side, new: Side) -> int:
    return ExchangePlan.of(old, new, sizes(old)).total_bytes


def test_another_order_of_ranks_makes_two_tp_layouts_overlap() -> None:
    tensor, mixed = Strategy(tp=4), Strategy(dp=2, tp=2)
    held = {order: side(order.mesh) for order in (tensor, *orders(mixed, one_node=True))}

    there = placed(mixed, lambda order: total(held[tensor], held[order]), one_node=True)
    back = placed(tensor, lambda order: total(held[there], held[order]), one_node=True)

    assert there.slowest == "tp" and str(there) == str(mixed)
    assert there.mesh.groups("tp") == [(0, 2), (1, 3)] and there.mesh.groups("dp") == [(0, 1), (2, 3)]
    assert total(held[tensor], held[there]) * 3 == total(held[tensor], held[mixed]) * 2
    assert total(held[there], held[back]) == 0 < total(held[mixed], held[back])


@pytest.mark.parametrize(("old", "new"), PAIRS[::5])
def test_the_chosen_order_moves_the_fewest_bytes(old: str, new: str) -> None:
    strategy = Strategy.parse(new, 4)
    zero = strategy.zero
    found = orders(strategy, one_node=True)

    best = placed(strategy, lambda order: total(STRATEGIES[old], side(order.mesh, zero)), one_node=True)

    assert total(STRATEGIES[old], side(best.mesh, zero)) == min(
        total(STRATEGIES[old], side(order.mesh, zero)) for order in found
    )
    assert best == strategy or total(STRATEGIES[old], side(best.mesh, zero)) < plan(old, new).total_bytes


def test_tp_stays_the_fastest_axis_on_several_nodes_or_if_the_order_saves_nothing() -> None:
    assert placed(Strategy(dp=2, tp=2), lambda order: order.slowest != "tp", one_node=False) == Strategy(dp=2, tp=2)
    assert placed(Strategy(dp=2, tp=2), lambda order: 7, one_node=True) == Strategy(dp=2, tp=2)
    assert Strategy(tp=4, slowest="tp") == Strategy(tp=4) and Strategy(dp=4, slowest="tp") == Strategy(dp=4)
    # A given strategy gets the best order, not the order that it had before.
    assert orders(Strategy(dp=2, tp=2, slowest="tp"), one_node=False) == [Strategy(dp=2, tp=2)]


def test_data_that_the_same_node_holds_comes_from_that_node() -> None:
    whole = Layout.whole((8, 4))
    halves = [whole.part(0, 2, 0), whole.part(0, 2, 1)]
    old = [{"a": halves[0]}, {"a": halves[1]}, {"a": halves[0]}, {"a": halves[1]}]  # two nodes hold all of it
    new = [{"a": whole}] * 4

    for node_of, crosses in (((0, 0, 1, 1), False), ((0, 1, 1, 0), False), ((0, 1, 0, 1), True)):
        pairs = ExchangePlan.of(old, new, {"a": 4}, node_of=node_of).pairs
        assert any(node_of[src] != node_of[dst] for src, dst in pairs) is crosses
        assert sum(pairs.values()) == 4 * 16 * 4


def crossing(made: ExchangePlan, node_of: tuple[int, ...]) -> int:
    """Return the bytes between nodes."""
    return sum(moved for (src, dst), moved in made.pairs.items() if node_of[src] != node_of[dst])


@pytest.mark.parametrize("seed", range(12))
def test_data_that_a_node_lacks_is_sent_to_it_once(seed: int) -> None:
    ranks, node_of = 4, ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1))[seed % 3]
    old, new, itemsize = scattered_sides(seed)

    made = ExchangePlan.of(old, new, itemsize, node_of=node_of)

    least = 0  # element by element: a rank of the node needs it, and none of its ranks holds it
    for node in set(node_of):
        there = [rank for rank in range(ranks) if node_of[rank] == node]
        for key, size in itemsize.items():
            shape = box_shape(old, key)
            wanted = np.logical_or.reduce([painted(new[rank].get(key), shape) for rank in there])
            here = np.logical_or.reduce([painted(old[rank].get(key), shape) for rank in there])
            least += size * int((wanted & ~here).sum())
    assert crossing(made, node_of) == least < crossing(made.without_relays(), node_of)
    assert list(made.bytes) == lacking(old, new, itemsize) == list(made.without_relays().bytes)
    assert sum(made.sent) == made.total_bytes


def test_a_switch_from_pp_to_ddp_over_two_nodes_sends_each_stage_across_once() -> None:
    old, new = side(Mesh(dp=4, pp=2)), side(Mesh(dp=8))
    state, node_of = bytes_of(new[0]), (0, 0, 0, 0, 1, 1, 1, 1)
    sizes_of = sizes(old, new)

    made = ExchangePlan.of(old, new, sizes_of, node_of=node_of)

    assert crossing(made, node_of) == state  # each stage once, to the other node
    assert crossing(made.without_relays(), node_of) == 4 * state
    arrives = [sum(moved for (src, dst), moved in made.pairs.items() if dst == at and node_of[src] != node_of[at])
               for at in range(8)]  # fmt: skip
    assert max(arrives) <= 2 * min(arrives)  # the network cards of all ranks share the bytes


def test_relayed_data_arrived_in_an_earlier_round() -> None:
    node_of = (0, 0, 1, 1)
    old, new, itemsize = scattered_sides(3)
    made = ExchangePlan.of(old, new, itemsize, node_of=node_of)
    got: set[tuple[int, str, tuple[int, ...]]] = set()
    handed_on = 0
    for each in rounds(made, limit=64):
        sends = [(part, move, key) for part in each.parts for move in part.moves for key in part.keys]
        for part, move, key in sends:
            if part.relayed:
                handed_on += 1
                assert all((move.src, key, at) in got for at in elements(move.box))
        got |= {(move.dst, key, at) for _, move, key in sends for at in elements(move.box)}
    assert handed_on > 5


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape, strict=True))))
