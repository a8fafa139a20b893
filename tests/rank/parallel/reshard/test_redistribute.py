"""Test the data movement of a switch over four real ranks: it is exact to the bit and the byte, or refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.reshard.redistribute import ROUND_BYTES, Exchange, plan_collectively
from nbkit.tensor_layout import Layout

CPU = torch.device("cpu")
Side = list[dict[str, Layout]]
RANKS = 4
FAMILIES = ("replicated", "rows", "columns", "packed", "stages", "squares")
MODEL: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    **{f"weight/{n}.up": ((24, 8), torch.float32) for n in range(3)},
    **{f"exp_avg/{n}.up": ((24, 8), torch.float64) for n in range(3)},
    **{f"weight/{n}.norm": ((7,), torch.bfloat16) for n in range(3)},
    **{f"step/{n}.up": ((), torch.int64) for n in range(3)},
    "weight/kernel": ((5, 3, 2, 2), torch.float32),
    "mask/kernel": ((5, 3), torch.bool),
    "weight/empty": ((0, 4), torch.float32),
    "weight/large": ((300, 70), torch.float32),
}


def sides(family: str) -> Side:
    """Return the layouts of MODEL on each rank under a family."""
    found: Side = [{} for _ in range(RANKS)]
    for number, (key, (shape, _)) in enumerate(MODEL.items()):
        whole = Layout.whole(shape)
        for rank in range(RANKS):
            layout: Layout | None = whole
            if family == "stages":
                layout = whole if number % RANKS == rank else None
            elif family == "rows" and shape:
                layout = whole.part(0, RANKS, rank)
            elif family == "columns" and len(shape) > 1:
                layout = whole.part(1, RANKS, rank)
            elif family == "squares" and len(shape) > 1:
                layout = whole.part(1, 2, rank % 2).part(0, 2, rank // 2)
            elif family == "packed" and shape and shape[0] % 3 == 0 and shape[0] > 0:
                third = Layout.whole((shape[0] // 3, *shape[1:])).part(0, RANKS, rank).pieces
                start, length = (third[0][1].start[0], third[0][1].shape[0]) if third else (0, 0)
                starts = [i * shape[0] // 3 + start for i in range(3)]
                layout = Layout.of_ranges(shape, 0, [(at, at + length) for at in starts])
            if layout is not None:
                found[rank][key] = layout
    return found


def value(key: str) -> Tensor:
    """Return the global tensor, of random bits."""
    shape, dtype = MODEL[key]
    made = torch.Generator().manual_seed(sorted(MODEL).index(key))
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=made
    )
    return raw.view(dtype).reshape(shape)


def part_of(key: str, layout: Layout) -> Tensor:
    whole = value(key)
    part = torch.empty(layout.local, dtype=whole.dtype)
    for here, there in layout.pieces:
        part[here.slices] = whole[there.slices]
    return part


def state_of(holding: dict[str, Layout]) -> dict[str, tuple[Tensor, Layout]]:
    return {key: (part_of(key, layout), layout) for key, layout in holding.items()}


def same(tensor: Tensor, wanted: Tensor) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, wanted)]
    return tensor.dtype == wanted.dtype and tensor.shape == wanted.shape and torch.equal(*bits)


def lower_bound(old: Side, new: Side) -> list[int]:
    """Return for each rank the bytes of the elements that it needs and does not hold, counted on tensors of flags."""
    found = []
    for before, after in zip(old, new, strict=True):
        total = 0
        for key, layout in after.items():
            wanted = torch.zeros(MODEL[key][0], dtype=torch.bool)
            for _, there in layout.pieces:
                wanted[there.slices] = True
            for _, there in before[key].pieces if key in before else ():
                wanted[there.slices] = False
            total += int(wanted.sum()) * MODEL[key][1].itemsize
        found.append(total)
    return found


def mixed(draw: random.Random) -> Side:
    """Return layouts in which each tensor follows its own family."""
    every = {family: sides(family) for family in FAMILIES}
    chosen = {key: every[draw.choice(FAMILIES)] for key in MODEL}
    return [{key: chosen[key][rank][key] for key in MODEL if key in chosen[key][rank]} for rank in range(RANKS)]


def pairs() -> list[tuple[Side, Side]]:
    every = {family: sides(family) for family in FAMILIES}
    return [
        *[(every[old], every[new]) for old, new in itertools.permutations(FAMILIES, 2)],
        *[(mixed(random.Random(seed)), mixed(random.Random(seed + 100))) for seed in range(8)],
    ]


class Wire:
    """A context that lists what this rank sends: (operation, bytes)."""

    def __enter__(self) -> list[tuple[str, int]]:
        self.sent: list[tuple[str, int]] = []
        self.listener = lambda operation, group, moved: self.sent.append((operation, moved))
        delegating_group.listeners.append(self.listener)
        return self.sent

    def __exit__(self, *_: object) -> None:
        delegating_group.listeners.remove(self.listener)


def moves_all(world: Any) -> int:
    """Move every pair out of place, and return the moved bytes."""
    total = handed_on = 0
    for number, (old, new) in enumerate(pairs()):
        source = state_of(old[world.place.rank])
        target = {
            key: (torch.full(layout.local, 77).to(MODEL[key][1]), layout)
            for key, layout in new[world.place.rank].items()
        }
        node_of = (0, 0, 1, 1) if number % 3 else ()  # with nodes, ranks forward data that their node lacks
        plan = ExchangePlan.of(old, new, {key: dtype.itemsize for key, (_, dtype) in MODEL.items()}, node_of=node_of)
        handed_on += sum(group.relayed for group in plan.groups)
        if number % 21 == 0:
            assert plan_collectively(source, new[world.place.rank]).groups == plan.groups
        exchange = Exchange(plan, world.place.rank, limit=4096 if number % 2 else ROUND_BYTES)
        with Wire() as wire:
            exchange.run(source, target, device=CPU)
        for key, (tensor, layout) in target.items():
            assert same(tensor, part_of(key, layout)), f"pair {number}: {key}"
        for key, (tensor, layout) in source.items():
            assert same(tensor, part_of(key, layout)), f"pair {number}: {key} of the old side changed"
        assert list(plan.bytes) == lower_bound(old, new)
        assert sum(moved for _, moved in wire) == plan.sent[world.place.rank]
        assert all(operation == "all_to_all" for operation, _ in wire)
        assert wire == [] or plan.total_bytes
        assert exchange.buffer_bytes <= 2 * exchange.limit
        assert all(moved <= exchange.limit for _, moved in wire)
        total += plan.bytes[world.place.rank]
    assert handed_on > 10
    return total


def test_every_pair_arrives_exactly_with_the_fewest_possible_bytes() -> None:
    every = run_ranks(moves_all, RANKS, timeout=120)

    assert sum(every) == sum(sum(lower_bound(old, new)) for old, new in pairs())


def refuses(world: Any) -> list[str]:
    old, new = sides("rows"), sides("columns")
    plan = ExchangePlan.of(old, new, {key: dtype.itemsize for key, (_, dtype) in MODEL.items()})
    told = []
    stale, target = state_of(sides("replicated")[world.place.rank]), state_of(new[world.place.rank])
    double = {k: (t.double() if k == "weight/0.up" else t, layout) for k, (t, layout) in target.items()}
    for source, into in ((stale, target), (state_of(old[world.place.rank]), double), ({}, target)):
        with pytest.raises(TrainingError) as error:
            Exchange(plan, world.place.rank).run(source, into, device=CPU)
        told.append(str(error.value))
    lacking = {} if world.place.rank == 1 else state_of(old[world.place.rank])
    with pytest.raises(TrainingError) as error:
        plan_collectively(lacking, new[world.place.rank])
    told.append(str(error.value))
    unequal = {"a": (torch.zeros(4, dtype=torch.float16 if world.place.rank else torch.bfloat16), Layout.whole((4,)))}
    with pytest.raises(TrainingError) as error:
        plan_collectively(unequal, {"a": Layout.whole((4,))})
    told.append(str(error.value))
    return told


def test_shards_that_do_not_fit_the_plan_are_refused_before_sending() -> None:
    for stale, double, absent, lacking, unequal in run_ranks(refuses, RANKS):
        assert "of the old shards differs from the plan of the switch" in stale
        assert "'weight/0.up' of the new shards" in double
        assert "not there" in absent
        assert "No rank holds" in lacking and "exp_avg/0.up[6:12" in lacking
        assert "different dtypes" in unequal


def alone(world: Any) -> None:
    state = {"a": (torch.arange(6.0).view(2, 3), Layout.whole((2, 3)))}
    plan = plan_collectively(state, {"a": Layout.whole((2, 3))})
    target = {"a": (torch.zeros(2, 3), Layout.whole((2, 3)))}
    with Wire() as wire:
        Exchange(plan, 0).run(state, target, device=CPU)
    assert wire == [] and torch.equal(target["a"][0], state["a"][0])


def test_redistribute_works_on_one_rank() -> None:
    run_ranks(alone, 1)
