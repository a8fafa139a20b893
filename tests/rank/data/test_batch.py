"""Test that batches without rows to cut are refused by kind, with a hint what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.batch import check_rows, shard_of

ROWS, TIME = 4, 5


class Graph:
    """A batch like PyG's `Data`: the nodes of all graphs follow one another."""

    x, edge_index, batch = torch.zeros(9, 3), torch.zeros(2, 12), torch.zeros(9)


def unequal() -> list[torch.Tensor]:
    return [torch.zeros(2 + i % 3, 3) for i in range(ROWS)]


TARGET = torch.zeros(ROWS)
KINDS: dict[str, tuple[Any, str, str]] = {
    "packed": ((pack_sequence(unequal(), enforce_sorted=False), TARGET), "a PackedSequence", "pad_sequence"),
    "nested": ((torch.nested.nested_tensor(unequal()), TARGET), "a nested tensor", "to_padded_tensor"),
    "nested behind": ({"x": TARGET, "y": torch.nested.nested_tensor(unequal())}, "a nested tensor", "to_padded_tensor"),
    "sparse": ((torch.zeros(TIME, 3).to_sparse(), TARGET), "a sparse tensor", "to_dense"),
    "images": ((unequal(), TARGET), "a list of tensors of unequal shapes", "boxes padded"),
    "boxes": (([torch.zeros(3, 8, 8)] * ROWS, [{"boxes": torch.zeros(i, 4)} for i in range(ROWS)]), "dicts", "boxes"),
    "graph": (Graph(), "got Graph", "pad the nodes"),
    "time first": ((torch.zeros(TIME, ROWS, 3), TARGET), "another dim, such as time", "x.transpose(0, 1)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_rows_is_refused_by_its_kind(kind: str) -> None:
    batch, what, hint = KINDS[kind]
    for collated in (True, False):
        with pytest.raises(TrainingError) as raised:
            if collated:
                check_rows(batch, ROWS)
            shard_of(batch, ranks=2, rank=0)
        assert what in str(raised.value) and hint in raised.value.hint, str(raised.value)


class Encoder(nn.Module):
    """A layer with torch's default, time first, that gets rows first. turns: transpose them."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.layer, self.turns = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1) if self.turns else self.layer(x)


def test_a_layer_that_takes_time_first_is_named_and_its_hint_works() -> None:
    batch = torch.randn(ROWS, TIME, 8), torch.randn(ROWS, TIME, 8)
    said = nbkit.check(Encoder(turns=False), "ddp", batch, 2, loss=F.mse_loss)
    assert not said.ok and "'layer.self_attn' has batch_first=False" in str(said), str(said)
    assert "x.transpose(0, 1)" in str(said)
    assert nbkit.check(Encoder(turns=True), "ddp", batch, 2, loss=F.mse_loss).ok
