"""Tensors in a matrix with a row per rank: all of each is there, aligned, and little is sent that is none of them."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from nbkit.rank.parallel.data_parallel import buckets, zero1_2
from nbkit.rank.parallel.data_parallel.buckets import InFlight, Links, Packing, Reduction, flat_with_views

BLOCK = [(320,), (960, 320), (960,), (320, 320), (320,), (320,), (1280, 320), (1280,), (320, 1280), (320,)]
ODD = [(8, 3), (7,), (), (12, 5), (4,), (0, 3), (12, 64, 70), (5, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_packed_is_where_each_rank_looks_for_it_and_comes_out_again(ranks: int) -> None:
    packing = Packing.of(ODD, ranks, torch.empty(0))
    tensors = [torch.randn(shape) for shape in ODD]
    matrix = torch.full((ranks, packing.width), 9.0)
    packing.pack(matrix, tensors)
    flats = [torch.zeros(tensor.numel()) for tensor in tensors]
    packing.unpack(matrix, flats)

    for i, tensor in enumerate(tensors):
        for rank in range(ranks):
            mine = tensor[packing.rows(i, rank)] if tensor.ndim else tensor
            assert torch.equal(packing.shard(matrix[rank], i, rank), mine)
        assert torch.equal(flats[i], tensor.flatten())
    packing.pack(matrix, [None] * len(tensors))
    assert not any(packing.shard(matrix[0], i, 0).any() for i in range(len(tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_and_large_tensors_begin_at_128_bytes_and_padding_is_below_a_hundredth(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(buckets, "reduce_scatter", lambda row, matrix, **_: sent.append(matrix))
    like = torch.empty(0, dtype=dtype)
    for shapes in (BLOCK, ODD):
        packing = Packing.of(shapes, ranks, like)
        links = Links(group=None, ranks=ranks, index=0, across=None, replica=0)
        Reduction(packing, links, like).send([torch.ones(shape, dtype=dtype) for shape in shapes])
        row = sent[-1].nbytes // ranks
        starts = [start * dtype.itemsize for start in packing.starts]
        large = [width * dtype.itemsize >= 12800 for width in packing.widths]
        whole, views = flat_with_views(shapes, like)

        assert row % 128 == 0
        assert all(start % (128 if is_large else 16) == 0 for start, is_large in zip(starts, large, strict=True))
        assert all((view.data_ptr() - whole.data_ptr()) % 128 == 0 for view in views if view.numel())
        assert [view.numel() for view in views] == [prod(shape) for shape in shapes]
        if shapes is BLOCK:
            assert any(large) and ranks * row <= 1.01 * dtype.itemsize * sum(map(prod, shapes))


def test_a_gradient_of_one_backward_pass_goes_to_the_message_without_a_stop_in_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(buckets, "reduce_scatter", lambda row, matrix, **_: sent.append(matrix))
    links = Links(group=None, ranks=2, index=0, across=None, replica=0)
    wholes = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(6))]
    bucket = zero1_2._Bucket(wholes, [nn.Parameter(p[: len(p) // 2]) for p in wholes], links, InFlight(), buffer=True)
    for p in wholes:
        p.grad = torch.ones_like(p)
    bucket.send()
    assert not any(view.any() for view in bucket.views)
    assert all(
        bucket.packing.shard(row, i, rank).all() for rank, row in enumerate(sent[0].view(2, -1)) for i in range(2)
    )
    assert all(p.grad is None for p in wholes)
