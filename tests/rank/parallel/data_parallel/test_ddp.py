"""Test that gradients are sums over the ranks, whatever part of the model a rank has used."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.data_parallel import buckets
from nbkit.rank.parallel.data_parallel.ddp import Replicas, ReplicaSetup, broadcast_from_first


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, which: bool) -> Tensor:
        return self.sometimes(self.always(x)) if which else self.always(x)


def reduced(model: nn.Module, replicas: Replicas, loss: Any) -> dict[str, Tensor | None]:
    for p in model.parameters():
        p.grad = None
    replicas.reset()
    replicas.start()
    loss().backward()
    replicas.finish()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def partly_used(world: Any) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = Parts()
    replicas = Replicas(model, ReplicaSetup(ranks=2))
    x = torch.ones(2, 4) * (1 + world.place.rank)

    def loss(step: int) -> Tensor:
        return model(x, world.place.rank == step % 2).sum()

    return [reduced(model, replicas, partial(loss, step)) for step in range(3)]


def test_parameters_used_by_some_ranks_are_summed_and_unused_ones_stay_none() -> None:
    torch.manual_seed(0)
    model = Parts()
    first, second = run_ranks(partly_used, 2)

    for step in range(3):
        for p in model.parameters():
            p.grad = None
        for rank in range(2):
            model(torch.ones(2, 4) * (1 + rank), rank == step % 2).sum().backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == name.startswith("never")
            for found in (first, second):
                if p.grad is None:
                    assert found[step][name] is None
                else:
                    torch.testing.assert_close(found[step][name], p.grad)


def traffic(world: Any) -> list[Any]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    replicas = Replicas(model, ReplicaSetup(ranks=2))
    sent: list[tuple[str, int]] = []
    reduced(model, replicas, lambda: model(torch.ones(1, 256)).sum())
    delegating_group.listeners.append(lambda op, group, nbytes: sent.append((op, nbytes)))
    reduced(model, replicas, lambda: model(torch.ones(1, 256)).sum())
    during: list[int] = []
    model[1].register_full_backward_hook(lambda *_: during.append(len(sent)))
    sent.clear()
    reduced(model, replicas, lambda: model(torch.ones(1, 256, requires_grad=True)).sum())
    return [sent, during, sum(p.numel() for p in model.parameters()), len(list(model.parameters()))]


def test_only_gradients_are_sent_and_the_first_during_backward() -> None:
    sent, during, num_parameters, num_tensors = run_ranks(traffic, 2)[0]

    assert {op for op, _ in sent} == {"all_reduce"}
    assert sum(nbytes for _, nbytes in sent) == 4 * (num_parameters + num_tensors + len(sent))
    assert len(sent) == 2 and during == [1]


def changed_by_hand(world: Any) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    broadcast_from_first(model, world_size=2)
    replicas = Replicas(model, ReplicaSetup(ranks=2))
    x = torch.ones(1, 3) * (1 + world.place.rank)
    before = reduced(model, replicas, lambda: model(x).sum())
    model[0].requires_grad_(False)
    frozen = reduced(model, replicas, lambda: model(x).sum())
    model[0].requires_grad_(True)
    again = reduced(model, replicas, lambda: model(x).sum())
    with pytest.raises(RuntimeError, match="broken"):
        replicas.reset()
        replicas.start()
        raise RuntimeError("broken off before backward")
    after = reduced(model, replicas, lambda: model(x).sum())
    return [before, frozen, again, after]


def test_sums_stay_right_after_freezing_unfreezing_and_an_interrupted_step() -> None:
    for before, frozen, again, after in run_ranks(changed_by_hand, 2):
        assert frozen["0.weight"] is None and torch.equal(frozen["1.weight"], before["1.weight"])
        for name in before:
            assert torch.equal(again[name], before[name]) and torch.equal(after[name], before[name])


def kinds_of_tensors(world: Any) -> bool:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.brief = nn.Parameter(torch.full((3,), float(world.place.rank), dtype=torch.bfloat16))
            self.turned = nn.Parameter(torch.full((2, 3), float(world.place.rank)).t())
            self.register_buffer("flags", torch.tensor([world.place.rank == 0]))
            self.register_buffer("count", torch.tensor(world.place.rank))

    model = Odd()
    broadcast_from_first(model, world_size=2)
    zero = all(float(t.float().abs().sum()) == 0 for t in (model.brief, model.turned, model.count))
    replicas = Replicas(model, ReplicaSetup(ranks=2))
    grads = reduced(model, replicas, lambda: model.brief.float().sum() + model.turned.sum())
    summed = all(bool((g == 2).all()) for g in grads.values() if g is not None)
    return zero and bool(model.flags) and summed and grads["brief"].dtype == torch.bfloat16


def test_bool_buffers_bfloat16_and_transposed_parameters_are_broadcast_and_summed() -> None:
    assert run_ranks(kinds_of_tensors, 2) == [True, True]


def reentrant(world: Any) -> str:
    model = nn.Linear(3, 3)
    replicas = Replicas(model, ReplicaSetup(ranks=2))
    x = torch.ones(1, 3, requires_grad=True)

    def twice() -> Tensor:
        return sum(checkpoint(model, x, use_reentrant=True).sum() for _ in range(2))

    with pytest.raises(TrainingError) as raised:
        reduced(model, replicas, twice)
    return str(raised.value)


def test_a_gradient_that_comes_twice_is_refused() -> None:
    for message in run_ranks(reentrant, 2):
        assert "computed the gradient of" in message and "twice" in message and "use_reentrant=False" in message


def test_buckets_hold_every_parameter_once_and_split_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET", 64)
    params = [nn.Parameter(torch.zeros(16, dtype=torch.bfloat16 if i == 5 else torch.float32)) for i in range(8)]

    chunks = list(buckets.chunks([(str(i), p) for i, p in enumerate(params)], 128))

    assert chunks == [["0"], ["1", "2"], ["3", "4"], ["5"], ["6", "7"]]
