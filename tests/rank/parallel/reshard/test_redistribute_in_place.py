"""Test the data movement of a switch in place over four real ranks: exact, freed during the move, and reversible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from rounds_in_place import peaks

from nbkit.errors import TrainingError
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.parallel.reshard.redistribute import InPlace, SourceStorage, TargetStorage, emptied, hollow
from nbkit.tensor_layout import Layout
from tests.rank.parallel.reshard.test_redistribute import MODEL, RANKS, Wire, pairs, part_of, same

CPU = torch.device("cpu")
Holding = dict[str, Layout]


class Refusing(TargetStorage):
    """A storage without memory for one tensor: that at which `left` falls to 0."""

    left: int | None = None

    def take(self, key: str) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no room for " + key)
        super().take(key)


def filled(holding: Holding) -> SourceStorage:
    return SourceStorage({key: (part_of(key, layout), layout) for key, layout in holding.items()}, ())


def empty(holding: Holding) -> Refusing:
    with hollow() as spaces:
        state = {
            key: (emptied(torch.empty(layout.local, dtype=MODEL[key][1])), layout) for key, layout in holding.items()
        }
    return Refusing(state, spaces)


def num_bytes(side: SourceStorage | TargetStorage) -> int:
    """Return the bytes of all storages, each counted once. Storages of up to 8 bytes are not counted."""
    storages = {id(tensor): tensor.untyped_storage() for tensor, _ in side.state.values()}
    return sum(storage.nbytes() for storage in storages.values() if storage.nbytes() > 8)


def holds(side: SourceStorage | TargetStorage) -> bool:
    return all(same(tensor, part_of(key, layout)) for key, (tensor, layout) in side.state.items())


def planned(old: list[Holding], new: list[Holding]) -> ExchangePlan:
    return ExchangePlan.of(old, new, {key: dtype.itemsize for key, (_, dtype) in MODEL.items()})


def moves(world: Any) -> None:
    for number, (before, after) in enumerate(pairs()[::5]):
        old, new = filled(before[world.place.rank]), empty(after[world.place.rank])
        plan = planned(before, after)
        exchange = InPlace(plan, world.place.rank, limit=4096)
        exchange.check(old, new)
        assert num_bytes(new) == 0
        with Wire() as wire:
            exchange.run(old, new, device=CPU)
        assert holds(new), f"pair {number}"
        assert num_bytes(old) == 0, f"pair {number}: the old side still has memory"
        assert sum(moved for operation, moved in wire if operation == "all_to_all") == plan.sent[world.place.rank]
        rest = [moved for operation, moved in wire if operation != "all_to_all"]
        assert rest == [8] * len(exchange.rounds)
        exchange.run_back(old, new, device=CPU, why="it was to go back")
        assert holds(old) and num_bytes(new) == 0, f"pair {number}, back"


def fails_and_goes_back(world: Any) -> list[str]:
    told = []
    for number, (before, after) in enumerate(pairs()[::4]):
        old, new = filled(before[world.place.rank]), empty(after[world.place.rank])
        if world.place.rank == 2:
            new.left = max(1, len(new.state) * 2 // 3) if number % 2 else 1  # fail in the middle, or at once
        freed: list[int] = []
        exchange = InPlace(planned(before, after), world.place.rank, limit=4096)
        try:
            exchange.run(old, new, device=CPU, freed=lambda new=new, freed=freed: freed.append(num_bytes(new)))
        except TrainingError as error:
            told.append(str(error))
        assert holds(old), f"pair {number}"
        assert num_bytes(new) == 0, f"pair {number}: memory of the new side is left"
        assert len(freed) >= 2 and freed[-1] == 0, f"pair {number}: nobody is told that memory is free again"
    return told


@pytest.mark.long
def test_every_part_is_freed_after_its_move_and_can_be_moved_back() -> None:
    run_ranks(moves, RANKS, timeout=120)


def test_a_rank_without_memory_makes_all_ranks_go_back() -> None:
    told = run_ranks(fails_and_goes_back, RANKS, timeout=120)

    assert all(len(each) == len(told[0]) >= 5 for each in told)
    assert all("rank 2: MemoryError: no room for" in line for line in told[2])
    assert all("back at the old one" in line and "another rank" in line for line in told[0])


def peak_memory(world: Any) -> tuple[int, int, int, int]:
    """Return (peak bytes of tensors, bytes before, bytes after, predicted peak)."""
    rank, shapes = world.place.rank, {f"weight/{n}": (64, 1024) for n in range(32)}
    before = [{k: Layout.whole(s).part(0, RANKS, r) for k, s in shapes.items()} for r in range(RANKS)]
    after = [{k: Layout.whole(s) for n, (k, s) in enumerate(shapes.items()) if n % 2 == r % 2} for r in range(RANKS)]
    plan = ExchangePlan.of(before, after, dict.fromkeys(shapes, 4))
    exchange = InPlace(plan, rank, limit=1 << 20)
    old = SourceStorage({key: (torch.ones(layout.local), layout) for key, layout in before[rank].items()}, ())
    with hollow() as spaces:
        new = Watched({key: (emptied(torch.empty(at.local)), at) for key, at in after[rank].items()}, spaces)
    new.other = old
    began = num_bytes(old)
    exchange.run(old, new, device=CPU)
    return new.most, began, num_bytes(new), peaks(plan, exchange.rounds)[rank]


class Watched(TargetStorage):
    """A storage that notes the peak memory of both sides, after each tensor that gets memory."""

    most = 0
    other: SourceStorage

    def take(self, key: str) -> None:
        super().take(key)
        self.most = max(self.most, num_bytes(self) + num_bytes(self.other))


def test_peak_memory_is_within_the_prediction_of_the_plan() -> None:
    for most, before, after, predicted in run_ranks(peak_memory, RANKS, timeout=60):
        assert most <= predicted <= max(before, after) + (10 << 20)
        assert most >= max(before, after)


def test_tensors_that_share_memory_are_freed_together_and_other_views_stay_valid() -> None:
    flat = torch.arange(12.0)
    one, two = flat[:4].view(2, 2), flat[6:]
    layouts = {"one": Layout.whole((2, 2)), "two": Layout.whole((6,))}
    side = SourceStorage({"one": (one, layouts["one"]), "two": (two, layouts["two"])}, [flat])
    seen = torch.Tensor.view(one, 4)  # a user's own view

    side.let_go("one")
    assert flat.untyped_storage().nbytes() == 48 and two.tolist() == [6, 7, 8, 9, 10, 11]
    side.let_go("two")
    assert flat.untyped_storage().nbytes() == 4 and one.shape == (2, 2) and seen.tolist() == [0, 1, 2, 3]
    side.take("two")
    flat.fill_(5)
    assert two.tolist() == [5] * 6 and one.tolist() == [[5, 5], [5, 5]] and one.is_contiguous()
