"""Masks that are hashes of coordinates: as random as coins, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nbkit.rank.rng.dropout_masks import coordinates, dropped, key_of


def mask(*key: int, shape: tuple[int, ...] = (16, 64, 128), p: float = 0.5, first: int = 0) -> Tensor:
    rows = torch.arange(first, first + shape[0])
    return dropped(key_of(*key), coordinates(shape, rows), p).view(shape)


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent bits give."""
    a, b = a.double().flatten() - 0.5, b.double().flatten() - 0.5
    return float((a * b).mean() * 4) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_as_asked_are_dropped_in_every_row_line_and_column(p: float) -> None:
    one = mask(3, 5, p=p).double()

    assert abs(one.mean() - p) < 4 * math.sqrt(p * (1 - p) / one.numel())
    for dims in ((0, 1), (0, 2), (1, 2), (2,), (1,), (0,)):
        over = math.prod(one.shape[d] for d in dims)
        scores = (one.mean(dims) - p) / math.sqrt(p * (1 - p) / over)
        assert 0.8 < scores.var() < 1.2 or scores.numel() < 200
        assert scores.abs().max() < 5.5


def test_masks_of_neighbours_have_nothing_in_common() -> None:
    one = mask(3, 5)
    others = {
        "step": mask(4, 5),
        "layer": mask(3, 6),
        "swapped": mask(5, 3),
        "sample": mask(3, 5, first=16),
        "next sample": one.roll(1, 0),
        "next line": one.roll(1, 1),
        "next element": one.roll(1, 2),
        "far element": one.roll(64, 2),
        "diagonal": one.roll((1, 1), (1, 2)),
        "transposed": mask(3, 5, shape=(16, 128, 64)).mT,
    }
    for what, other in others.items():
        assert abs(correlation(one, other)) < 4.5, what
    a, b, c = one, one.roll(1, 2), one.roll(2, 2)
    assert abs(correlation(a ^ b, c)) < 4.5
    # 256 keys in a row: the bit of one element is a coin too.
    coin = torch.stack([mask(k, shape=(8, 8, 8)) for k in range(256)]).double().mean(0)
    assert ((coin - 0.5) * 2 * 16).abs().max() < 5


def test_the_bits_are_those_of_the_published_hash() -> None:
    """Written once more with Python's integers, which have no width: the same on every device then."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    def bit(key: int, place: tuple[int, ...]) -> bool:
        low, high = key & 0xFFFFFFFF, key >> 32
        salted = [
            mix((x * 0x9E3779B9 & 0xFFFFFFFF) + (high ^ (dim * 0x2545F491 & 0x7FFFFFFF)) & 0xFFFFFFFF)
            for dim, x in enumerate(place)
        ]
        line = mix(salted[0] ^ low)
        for other in salted[1:-1]:
            line = mix(line ^ other)
        last = line ^ salted[-1]
        last = (last ^ last >> 16) * 0x7FEB352D & 0xFFFFFFFF
        last = (last ^ last >> 15) * 0x846CA68B & 0xFFFFFFFF
        return (last ^ 0x80000000) < round(0.3 * 2**32)

    key = key_of(11, 12, 13)
    assert key_of(11, 12) != key_of(12, 11) and 0 <= key < 2**64
    rows = torch.tensor([3, 100_000])
    found = dropped(key, coordinates((2, 3, 2, 5), rows), 0.3)
    for b, row in enumerate(rows.tolist()):
        for i in range(3):
            for j in range(2):
                assert found[b, i, j].tolist() == [bit(key, (row, i, j, k)) for k in range(5)]
    # More lines than fit into one piece of work.
    big = mask(1, shape=(3, 1500, 1024), p=0.2)
    assert torch.equal(big[2:, 1000:1001], mask(1, shape=(1, 1001, 1024), p=0.2, first=2)[:, 1000:])
