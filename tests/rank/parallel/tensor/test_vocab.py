"""Test that losses run on parts of logits, and other operations gather the logits, with the right gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.tensor import collectives
from nbkit.rank.parallel.tensor.sharded_tensor import VocabShard
from nbkit.tensor_layout import bounds
from verify.tensor_split import axes_of

V, B, T = 11, 3, 5


def losses(target: Tensor) -> dict[str, Any]:
    flat = target.reshape(-1)
    shifted = {"label_smoothing": 0.1, "ignore_index": 4}
    return {
        "mean": lambda x: F.cross_entropy(x.view(-1, x.size(-1)), flat),
        "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), flat, reduction="sum"),
        "none": lambda x: (F.cross_entropy(x.reshape(-1, V), flat, reduction="none") * torch.arange(B * T)).sum(),
        "smoothing": lambda x: nn.CrossEntropyLoss(**shifted)(x.double().reshape((-1, V)), flat),
        "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), target, ignore_index=4),
        "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), target),
        "shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), target[:, 1:].reshape(-1)),
        "rows": lambda x: F.cross_entropy(x[:, -1], target[:, -1]) + F.cross_entropy(x[0], target[0]),
        "masked": lambda x: F.cross_entropy(x[target > 3], target[target > 3]),
        "capped": lambda x: F.cross_entropy((torch.tanh(x / 3) * 3.0).view(-1, V), flat),
    }


def gathering(target: Tensor) -> dict[str, Any]:
    flat, weight = target.reshape(-1), torch.rand(V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {
        "weighted": lambda x: F.cross_entropy(x.view(-1, V), flat, weight=weight),
        "soft": lambda x: F.cross_entropy(x.view(-1, V), F.one_hot(flat, V).double() * 0.9 + 0.01),
        "log_softmax": lambda x: F.nll_loss(x.log_softmax(-1).view(-1, V), flat),
        "squares": lambda x: (x**2).mean() + x[..., 2].sum() + (x.view(B, -1) * 2).sum(),
    }


def shards(world: Any) -> dict[str, Any]:
    group = axes_of(world).group("tp")
    assert group is not None
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(B, T, V, generator=draw, dtype=torch.float64) * 3
    target = torch.randint(V, (B, T), generator=draw)
    start, stop = bounds(V, group.size(), group.rank())
    sent: list[int] = []
    delegating_group.listeners.append(lambda operation, label, num: sent.append(num))
    found: dict[str, Any] = {}
    for name, loss in {**losses(target), **gathering(target)}.items():
        truth = whole.clone().requires_grad_()
        expected = loss(truth)
        expected.backward()
        part = whole[..., start:stop].clone().requires_grad_()
        sent.clear()
        ours = loss(VocabShard(part, group, V))
        on_the_way = max(sent)
        ours.backward()
        assert truth.grad is not None
        assert part.grad is not None
        difference = float((part.grad - truth.grad[..., start:stop]).abs().max() / truth.grad.abs().max())
        found[name] = (difference, float((ours - expected).detach().abs()), on_the_way)
    shard = VocabShard(whole[..., start:stop], group, V)
    found["looks"] = (repr(shard), tuple(shard.shape), shard.size(-1), shard.ndim, len(shard), shard.requires_grad)
    found["values"] = (torch.equal(shard + 0, whole), torch.equal(shard.argmax(-1), whole.argmax(-1)))
    return found


def test_losses_on_parts_of_logits_are_right_and_send_little() -> None:
    answers = run_ranks(shards, 3)
    for found in answers:
        for name in losses(torch.zeros(B, T, dtype=torch.long)):
            difference, loss, most = found[name]
            assert difference <= 1e-12, name
            assert loss <= 1e-12, name
            assert most <= 3 * 8 * B * T, f"{name} sent more than three numbers per position"
        for name in gathering(torch.zeros(B, T, dtype=torch.long)):
            assert found[name][0] <= 1e-12, name
            assert found[name][1] <= 1e-12, name
        assert found["looks"][1:] == ((B, T, V), V, 3, B, False)
        assert found["values"] == (True, True)
    assert "holds 4:8 of dim 2" in answers[1]["looks"][0]


def changed_through_a_view(world: Any) -> dict[str, Any]:
    group = axes_of(world).group("tp")
    assert group is not None
    found: dict[str, Any] = {}
    target = torch.zeros(B, T, dtype=torch.long)
    for graph in (True, False):
        with torch.set_grad_enabled(graph):
            start, stop = bounds(V, group.size(), group.rank())
            logits = VocabShard(torch.zeros(B, T, stop - start, requires_grad=graph), group, V)
            logits[..., 2] + 1  # read, and not changed
            found[f"looked at {graph}"] = float(F.cross_entropy(logits.view(-1, V), target.view(-1)).detach())
            logits[..., V - 3 :].fill_(-1e9)
            try:
                F.cross_entropy(logits.view(-1, V), target.view(-1))
            except TrainingError as error:
                found[f"changed {graph}"] = str(error)
    whole = VocabShard(torch.zeros(B, T, stop - start), group, V) + 0
    whole[..., V - 3 :].fill_(-1e9)
    found["of its own"] = float(F.cross_entropy(whole.view(-1, V), target.view(-1)))
    return found


def test_an_in_place_change_of_a_view_of_logits_is_refused() -> None:
    for found in run_ranks(changed_through_a_view, 3):
        for graph in (True, False):
            assert found[f"looked at {graph}"] == pytest.approx(math.log(V))
            assert "in place, on a view" in found[f"changed {graph}"] and "logits + 0" in found[f"changed {graph}"]
        assert found["of its own"] == pytest.approx(math.log(V - 3))


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1)


def transposed(world: Any) -> list[str]:
    """Compare the forward and backward of each region function: sums over ranks of (value x weight of the rank)."""
    group = axes_of(world).group("tp")
    assert group is not None
    rank, size, total = group.rank(), group.size(), 7
    wrong = []

    def every(x: Tensor) -> list[Tensor]:
        shape = torch.tensor(x.shape[1])
        lengths = [torch.zeros_like(shape) for _ in range(size)]
        dist.all_gather(lengths, shape, group=group)
        padded = F.pad(x.detach(), (0, 0, 0, total - x.shape[1]))
        found = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(found, padded.contiguous(), group=group)
        return [t[:, : int(n)] for t, n in zip(found, lengths, strict=True)]

    def check(name: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape or not torch.allclose(got, expected, atol=1e-12, rtol=0):
            wrong.append(name)

    def varied(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    start, stop = bounds(total, size, rank)
    whole, mine = varied(2, total, 3, seed=0), varied(2, total, 3, seed=10 + rank)
    for name, function, given, grad in (
        ("copy_to", lambda x: collectives.copy_to(x, group), whole, mine),
        ("reduce_from", lambda x: collectives.reduce_from(x, group), mine, whole),
        ("split_to", lambda x: collectives.split_to(x, group, 1), whole, mine[:, start:stop]),
        ("gather_from", lambda x: collectives.gather_from(x, group, -2, total), mine[:, start:stop], whole),
        ("gather_seq", lambda x: collectives.gather_seq(x, group, 1, total), mine[:, start:stop], mine),
        ("reduce_scatter_seq", lambda x: collectives.reduce_scatter_seq(x, group, 1), mine, mine[:, start:stop]),
    ):
        x = given.clone().requires_grad_()
        y = function(x)
        y.backward(grad)
        assert x.grad is not None
        inputs, grads = every(x), every(grad)
        forward, backward = {
            "copy_to": (lambda _: whole, sum),
            "reduce_from": (sum, lambda _, grad=grad: grad),
            "split_to": (lambda _: whole[:, start:stop], joined),
            "gather_from": (joined, lambda _, grad=grad: grad[:, start:stop]),
            "gather_seq": (joined, lambda parts: sum(parts)[:, start:stop]),
            "reduce_scatter_seq": (lambda parts: sum(parts)[:, start:stop], joined),
        }[name]
        check(f"{name} forward", y, forward(inputs))
        check(f"{name} backward", x.grad, backward(grads))
    return wrong


def test_region_functions_have_right_values_and_gradients() -> None:
    assert run_ranks(transposed, 3) == [[], [], []]
