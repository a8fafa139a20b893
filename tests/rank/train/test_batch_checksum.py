"""The checksum by which a loop of one's own knows a batch again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nbkit.rank.train.own_loop.batch_checksum import NoChecksum, checksum


@dataclass
class Sample:
    text: str
    ids: torch.Tensor


def rows(last: float) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, last]])


CHANGED: list[tuple[Callable[[Any], Any], Any, Any]] = [
    (lambda last: (rows(last), rows(0.0)), 4.0, 5.0),
    (lambda last: {"x": rows(last).to(torch.bfloat16)}, 4.0, 5.0),
    (lambda last: [torch.tensor(last)], 4.0, 5.0),
    (lambda last: rows(last).t(), 4.0, 5.0),
    (lambda count: torch.zeros(count, 2), 4, 5),
    (lambda last: {"x": rows(last).numpy()}, 4.0, 5.0),
    (lambda word: np.array(["a", word], dtype=object), "b", "c"),
    (lambda word: ["a", word], "b", "c"),
    (lambda word: [["a"], [word, None, 1, 2.0]], "b", "c"),
    (lambda key: {key: rows(1.0)}, "x", "y"),
    (lambda word: Sample(word, rows(1.0)), "b", "c"),
    (lambda last: [Sample("a", rows(last))], 4.0, 5.0),
    (lambda kind: [kind(1)], int, float),
]


@pytest.mark.parametrize(("batch", "one", "other"), CHANGED)
def test_it_is_another_one_where_the_batch_is(batch: Callable[[Any], Any], one: Any, other: Any) -> None:
    assert checksum(batch(one)) == checksum(batch(one)) != checksum(batch(other))


class Graph:
    pass


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ([torch.zeros(2), Graph()], "a Graph"),
        ({"x": {1, 2}}, "a set"),
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "a tensor on meta"),
    ],
)
def test_of_what_it_does_not_know_it_makes_none_and_names_it(batch: Any, named: str) -> None:
    with pytest.raises(NoChecksum, match=named):
        checksum(batch)


def test_of_what_holds_itself_it_makes_none() -> None:
    batch: list[Any] = [Graph]
    batch[0] = batch
    with pytest.raises(NoChecksum, match="a list that holds itself"):
        checksum(batch)
