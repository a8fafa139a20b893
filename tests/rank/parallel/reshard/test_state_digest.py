"""Test that the digest is equal for equal values in any layout, and different for a single bit."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.reshard.state_digest import digest
from nbkit.tensor_layout import Layout

CPU = torch.device("cpu")
MASK, MASK_32 = (1 << 64) - 1, (1 << 32) - 1
VALUES: dict[str, Tensor] = {
    "weight/a": torch.randn(12, 7, generator=torch.Generator().manual_seed(1)),
    "exp_avg/a": torch.randn(12, 7, generator=torch.Generator().manual_seed(2)).double(),
    "weight/b": torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "step/a": torch.tensor(1234, dtype=torch.int64),
    "mask/a": torch.arange(9) % 2 == 0,
    "weight/none": torch.zeros(0, 3),
    # This is more than a chunk, in rows that do not divide it.
    "weight/long": torch.arange(70_001 * 2, dtype=torch.int32).view(70_001, 2),
}


def expected(values: dict[str, Tensor]) -> str:
    """Return the digest by its definition, in Python integers."""
    lines = []
    for key in sorted(values):
        tensor = values[key]
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        total = 0
        for index, bits in enumerate(tensor.contiguous().reshape(-1).view(kind).tolist()):
            if tensor.element_size() == 8:
                x = (index * 0x9E3779B97F4A7C15 + bits * 0xD1342543DE82EF95) & MASK
                x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
                x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
                total += x ^ x >> 31
            else:
                x = (index * 0x9E3779B1 + bits * 0x27D4EB2F) & MASK_32
                x = ((x ^ x >> 16) * 0x85EBCA6B) & MASK_32
                x = ((x ^ x >> 13) * 0xC2B2AE35) & MASK_32
                x ^= x >> 16
                total += x - (x >> 31 << 32)
        lines.append(f"{key} {tuple(tensor.shape)} {total & MASK:016x}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def layouts(way: str, ranks: int) -> list[dict[str, Layout]]:
    found: list[dict[str, Layout]] = [{} for _ in range(ranks)]
    for number, (key, tensor) in enumerate(VALUES.items()):
        whole = Layout.whole(tuple(tensor.shape))
        for rank in range(ranks):
            layout = whole
            if way == "rows" and tensor.ndim:
                layout = whole.part(0, ranks, rank)
            elif way == "columns" and tensor.ndim > 1:
                layout = whole.part(tensor.ndim - 1, ranks, rank)
            elif way == "stages" and number % ranks != rank:
                continue
            elif way == "packed" and tensor.ndim:
                half, length = rank * tensor.shape[0] // ranks, tensor.shape[0]
                layout = Layout.of_ranges(tuple(tensor.shape), 0, [(half, length), (0, half)])
            elif way == "overlapping" and tensor.ndim and rank:
                layout = whole.cut(0, tensor.shape[0] // (rank + 1), tensor.shape[0])
            found[rank][key] = layout
    return found


def part_of(whole: Tensor, layout: Layout) -> Tensor:
    part = torch.empty(layout.local, dtype=whole.dtype)
    for here, there in layout.pieces:
        part[here.slices] = whole[there.slices]
    return part


def all_ways(world: Any, ranks: int) -> tuple[list[str], list[int]]:
    found, moved = [], []
    delegating_group.listeners.append(lambda operation, group, size: moved.append(size))
    for way in ("replicated", "rows", "columns", "stages", "packed", "overlapping"):
        every = layouts(way, ranks)
        state = {key: (part_of(VALUES[key], layout), layout) for key, layout in every[world.place.rank].items()}
        before = {key: tensor.clone() for key, (tensor, _) in state.items()}
        found.append(digest(state, every, rank=world.place.rank, device=CPU))
        assert all(torch.equal(tensor, before[key]) for key, (tensor, _) in state.items())
    return found, moved


def test_the_digest_does_not_depend_on_layout_or_number_of_ranks() -> None:
    wanted = expected(VALUES)

    for ranks in (1, 4):
        for found, moved in run_ranks(all_ways, ranks, ranks):
            assert found == [wanted] * 6
            assert moved == [] if ranks == 1 else moved == [8 * len(VALUES)] * 6


def changed(world: Any) -> list[str]:
    """Return the digest in one process, and digests of values that differ as little as possible."""
    holding = {key: Layout.whole(tuple(tensor.shape)) for key, tensor in VALUES.items()}

    def of(values: dict[str, Tensor]) -> str:
        state = {key: (tensor, holding[key]) for key, tensor in values.items()}
        return digest(state, [holding], rank=0, device=CPU)

    found = [of(VALUES)]
    for key, bit in (("weight/a", 31), ("weight/a", 0), ("exp_avg/a", 63), ("weight/b", 15), ("step/a", 0)):
        flipped = VALUES[key].clone()
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flipped.element_size()]
        one = torch.tensor(1 << bit).to(kind) if bit < 8 * flipped.element_size() - 1 else torch.iinfo(kind).min
        flipped.reshape(-1).view(kind)[-1] ^= one
        found.append(of({**VALUES, key: flipped}))
    found.append(of({**VALUES, "weight/a": VALUES["weight/a"].flip(0)}))
    found.append(of({**VALUES, "weight/a": VALUES["weight/a"] * torch.tensor([1.0] * 6 + [-1.0])}))
    found.append(of({**VALUES, "exp_avg/a": VALUES["exp_avg/a"].roll(1, 1)}))
    return found


def test_a_single_bit_or_a_moved_value_changes_the_digest() -> None:
    (found,) = run_ranks(changed, 1)

    assert len(set(found)) == len(found) == 9


def one_rank_differs(world: Any) -> str:
    every = layouts("rows", 4)
    state = {key: (part_of(VALUES[key], layout), layout) for key, layout in every[world.place.rank].items()}
    if world.place.rank == 3:
        state["weight/a"][0][0, 0] += 1
    return digest(state, every, rank=world.place.rank, device=CPU)


def test_a_change_on_any_rank_changes_the_digest_on_all() -> None:
    found = run_ranks(one_rank_differs, 4)

    assert len(set(found)) == 1 and found[0] != expected(VALUES)


def test_a_dtype_without_an_integer_of_its_size_is_refused() -> None:
    layout = Layout.whole((2,))

    with pytest.raises(TrainingError, match="complex128"):
        digest({"a": (torch.zeros(2, dtype=torch.complex128), layout)}, [{"a": layout}], rank=0, device=CPU)
