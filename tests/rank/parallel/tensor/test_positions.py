"""Test that operations on single positions run on parts of hidden states, and all others gather the positions first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.parallel.tensor.sharded_tensor import PositionShard, completed, sendable
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.tensor_layout import bounds
from verify.models.specimens import LENGTH, VOCAB, WIDTH, ZOO
from verify.tensor_split import axes_of, compared, fill, specimen

B, T, D = 3, 7, 4
BYTES = 8 * B * T * D


def double(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


TABLE, SCALE, SHIFT, ONE = double(T, D, seed=1), double(D, seed=2), double(D, seed=3), double(seed=4)
EACH = double(B, T, D, seed=5)
LEARNED = (TABLE, SCALE, SHIFT, ONE, EACH)
SEEN = torch.rand(B, T, 1, generator=torch.Generator().manual_seed(6)) < 0.6


def in_place(x: Tensor) -> Tensor:
    x = x * 2
    y = x
    x += TABLE
    x.mul_(SCALE)
    return y.masked_fill_(~SEEN, 0.5) + x


def rms(x: Tensor) -> Tensor:
    return SCALE * (x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 0.1))


def dropped(x: Tensor) -> Tensor:
    with KeyedDropout(nn.Dropout(0.4), 1).step(3, range(B)):
        return F.dropout(x, 0.4)


def summed_into(total: Tensor, x: Tensor) -> Tensor:
    same = total
    total += x
    return same


def put_into(room: Tensor, x: Tensor) -> Tensor:
    room[:, 1:] = x
    return room


class Doubled(torch.autograd.Function):
    """A user's function, whose calls torch does not report to modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * 2, None


class Summed(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[:, None].expand(ctx.shape), None


def through_a_view(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0].add_(1.0)
    return x * 1


def into_them(x: Tensor) -> Tensor:
    return torch.add(EACH.detach(), 1, out=x.detach())


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "positions added": lambda x: x + TABLE,
    "added from the left": lambda x: TABLE[None] + x,
    "of every sample": lambda x: x - EACH,
    "in place": in_place,
    "layer norm": lambda x: F.layer_norm(x, (D,), SCALE, SHIFT),
    "rms norm": lambda x: F.rms_norm(x, (D,), weight=SCALE),
    "rms norm by hand": rms,
    "a learned number": lambda x: 1 - x * ONE / 3,
    "a mask": lambda x: (x * SEEN).masked_fill(~SEEN, 2.0) + torch.where(SEEN, x, 1.0),
    "dropout": dropped,
    "dropout not": lambda x: nn.Dropout(0.5).eval()(x),
    "activations": lambda x: F.gelu(x).tanh() + F.silu(x.contiguous()) * x.square(),
    "all of it": lambda x: x[:, slice(0, None), :].view(-1, T, D).reshape(x.shape),
    "shapes": lambda x: x + torch.zeros_like(x) + x.new_ones(B, 1, D) + TABLE[0].expand_as(x),
    "residual": lambda x: x + F.layer_norm(x, (D,)) * x.sum(-1, keepdim=True),
}
GATHERING: dict[str, Callable[[Tensor], Tensor]] = {
    "positions mixed": lambda x: x.cumsum(1),
    "a mean over them": lambda x: x.mean(1)[:, None] + x,
    "turned": lambda x: x.transpose(0, 1) * EACH.transpose(0, 1),
    "one of them": lambda x: x[:, -1] + x[:, 1:3].sum(1),
    "a map": lambda x: F.linear(x, TABLE),
    "a norm over positions": lambda x: F.layer_norm(x, (T, D)),
    "all samples at once": lambda x: x.view(B * T, D) @ TABLE.t(),
    "added to an ordinary tensor": lambda x: torch.ones(B, T, D, dtype=x.dtype).add_(x),
    "by its sign": lambda x: summed_into(torch.ones(B, T, D, dtype=x.dtype), x),
    "put into an ordinary tensor": lambda x: put_into(torch.ones(B, T + 1, D, dtype=x.dtype), x),
}


def ways(world: Any) -> dict[str, Any]:
    group = axes_of(world).group("tp")
    assert group is not None
    start, stop = bounds(T, group.size(), group.rank())
    whole = double(B, T, D, seed=0).detach()
    sent: list[tuple[str, int]] = []
    delegating_group.listeners.append(lambda operation, label, num: sent.append((operation, num)))
    found: dict[str, Any] = {}
    for name, way in {**WAYS, **GATHERING}.items():
        truth = whole.clone().requires_grad_()
        expected = way(truth)
        weight = double(*expected.shape, seed=9).detach()
        gradients = torch.autograd.grad((expected * weight).sum(), (truth, *LEARNED), allow_unused=True)
        part = whole[:, start:stop].clone().requires_grad_()
        sent.clear()
        ours = way(PositionShard(part, group, T))
        stays, on_the_way = isinstance(ours, PositionShard), list(sent)
        result = ours.gathered() if isinstance(ours, PositionShard) else ours
        found_gradients = torch.autograd.grad((result * weight).sum(), (part, *LEARNED), allow_unused=True)
        wanted = (gradients[0][:, start:stop], *gradients[1:])
        worst = float((result - expected).detach().abs().max())
        for got, want in zip(found_gradients, wanted, strict=True):
            assert (got is None) == (want is None), name
            worst = worst if got is None else max(worst, float((got - want).abs().max()))
        found[name] = (worst, stays, on_the_way)
    return found


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a function of the user's": (lambda x: Doubled.apply(x, SCALE), "torch.autograd.Function that takes them"),
    "one that gathers": (lambda x: Summed.apply(x, SCALE), "torch.autograd.Function that takes them"),
    "a checkpoint that detaches": (lambda x: checkpoint(torch.tanh, x, use_reentrant=True), "use_reentrant=False"),
    "one that gathers again": (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "operation __set__"),
    "in place through a view": (through_a_view, "write x = f(x) instead"),
    "given for the result": (into_them, "write x = f(x) instead"),
}


def refused(world: Any) -> dict[str, str]:
    group = axes_of(world).group("tp")
    assert group is not None
    start, stop = bounds(T, group.size(), group.rank())
    found = {}
    for name, (way, _) in REFUSED.items():
        part = double(B, T, D, seed=0).detach()[:, start:stop].clone().requires_grad_()
        try:
            # In a model, more operations would follow.
            (way(PositionShard(part, group, T)) * 2).sum().backward()
            found[name] = f"trains, gradient {part.grad}"
        except TrainingError as error:
            found[name] = str(error)
    found["gathered first"] = f"{Doubled.apply(PositionShard(part, group, T)[...], SCALE).requires_grad}"
    return found


def test_operations_whose_result_would_be_lost_are_refused() -> None:
    for found in run_ranks(refused, 2):
        assert found.pop("gathered first") == "True"
        for name, said in found.items():
            assert REFUSED[name][1] in said, (name, said)


def test_operations_by_position_send_nothing_and_others_gather_once() -> None:
    for found in run_ranks(ways, 3):
        for name in WAYS:
            worst, stays, sent = found[name]
            assert worst <= 1e-12, (name, worst)
            assert stays, name
            assert sent == [], f"{name} sent in forward"
        for name in GATHERING:
            worst, stays, sent = found[name]
            assert worst <= 1e-12, (name, worst)
            assert not stays or "mean" in name, name
            assert [operation for operation, _ in sent] == ["all_gather"], f"{name}: one gather for all who need it"


def wire(world: Any, names: list[str]) -> dict[str, Counter[str]]:
    """Count the bytes that this rank gives to each operation in a forward and backward pass."""
    axes = axes_of(world)
    sent: Counter[str] = Counter()
    delegating_group.listeners.append(lambda operation, label, num: sent.update({operation: num}))
    found = {}
    for name in names:
        model, (value, target) = ZOO[name].build(torch.float64), ZOO[name].batch(B, dtype=torch.float64)
        part = skeleton_of(model)
        fill(part, model, tensor_parallel(part, axes))
        sent.clear()
        ZOO[name].loss(call(part, value), target).backward()
        found[name] = Counter(sent)
    return found


def test_sent_bytes_equal_the_formula_of_the_literature() -> None:
    """Compare with Korthikanti et al. 2022: four all-gathers and reduce-scatters per block, one each for the ends."""
    names = ["gpt", "gpt_tied", "gpt2", "llama", "llama_tied", "qwen2"]
    hidden, ranks, layers = 8 * B * LENGTH * WIDTH, 2, 4
    for name, sent in run_ranks(wire, ranks, names, timeout=150)[0].items():
        positions, norm = (8 * LENGTH * WIDTH, 2 * 8 * WIDTH) if "gpt" in name else (0, 8 * WIDTH)
        assert sent == {
            "all_gather": ((4 * layers + 2) * hidden + positions) // ranks,
            "reduce_scatter": (4 * layers + 2) * hidden,
            "all_reduce": norm + 3 * 8 * B * LENGTH,
        }, name


class Skipping(nn.Module):
    """A model with its own code between blocks: positions, a learned skip, a mean over the past, scaled logits."""

    def __init__(self) -> None:
        super().__init__()
        inner = ZOO["gpt"].build()
        self.tokens, self.positions, self.blocks, self.norm = inner.tokens, inner.positions, inner.blocks, inner.norm
        self.mix = nn.Parameter(torch.tensor([0.3, 0.7]))
        self.head, self.scale = nn.Linear(WIDTH, VOCAB), nn.Parameter(torch.tensor(0.8))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.tokens(ids) * WIDTH**0.5
        places = self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.mix[0] * block(x + places) + self.mix[1] * first
        x = self.norm(x)
        return self.head(x - x.cumsum(1) / x.shape[1]) * self.scale


class Bare(nn.Module):
    """A model that returns its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        inner = ZOO["gpt"].build()
        self.tokens, self.blocks = inner.tokens, inner.blocks

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return {"hidden": x}


def models(world: Any) -> tuple[list[tuple[float, float]], tuple[bool, tuple[int, ...]]]:
    ids = torch.randint(VOCAB, (B, LENGTH - 1), generator=torch.Generator().manual_seed(0))
    skipping = compared(world, Skipping().double(), ids, lambda y: F.cross_entropy(y.flatten(0, 1), ids.flatten()))
    bare = compared(world, Bare().double(), ids, lambda y: (y["hidden"] ** 2).mean())
    short = specimen(world, "gpt_tied", length=1)
    given = bare[3](ids)["hidden"]
    return [each[:2] for each in (skipping, bare, short)], (type(given) is Tensor, tuple(given.shape))


@pytest.mark.long
def test_models_with_their_own_code_between_blocks_have_right_gradients() -> None:
    for found, given in run_ranks(models, 2, timeout=150):
        for worst, difference in found:
            assert worst <= 1e-12
            assert difference <= 1e-12
        assert given == (True, (B, LENGTH - 1, WIDTH))


def crossing(world: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    group = axes_of(world).group("tp")
    assert group is not None
    found = []
    for total in (1, 2, 7):
        start, stop = bounds(total, group.size(), group.rank())
        whole = torch.arange(total * D).view(1, total, D).double()
        sent = sendable(PositionShard(whole[:, start:stop], group, total))
        there = completed(sent, whole.shape, group)
        same = there.gathered() if isinstance(there, PositionShard) else there
        found.append((tuple(sent.shape), tuple(there.shape), torch.equal(same, whole)))
    return found


def test_positions_cross_to_the_next_stage_in_parts() -> None:
    """Check that each rank sends its positions, even if it has none. All ranks send a single position whole."""
    for rank, found in enumerate(run_ranks(crossing, 3)):
        parts = [1, [1, 1, 0][rank], [3, 2, 2][rank]]
        assert found == [((1, part, D), (1, total, D), True) for part, total in zip(parts, (1, 2, 7), strict=True)]
