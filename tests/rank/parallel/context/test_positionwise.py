"""Test that models that mix positions train right under context parallelism, or are refused by name before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.parallel.context.attention import argument_names
from nbkit.rank.parallel.context.positionwise import try_in_parts
from nbkit.rank.parallel.tensor.layers import Around, put_around
from verify.models.odd import (
    HEADS,
    LENGTH,
    LM,
    MLP,
    WIDTH,
    Block,
    NanoGPT,
    built,
    doing,
    penalised,
    penalty,
    rows,
    verdict,
)


class Mixing(Block):
    """A block with its own operation between attention and MLP."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.inner = mix, nn.Linear(WIDTH, WIDTH)
        self.kernel, self.table = nn.Parameter(torch.randn(WIDTH, 1, 3)), nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mix(self, x))


def attention_by_hand(block: Any, x: Tensor) -> Tensor:
    return torch.softmax(x @ block.inner(x).transpose(1, 2) / 4, -1) @ x


def convolution(block: Any, x: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), block.kernel, groups=WIDTH).transpose(1, 2)


def hidden_gradient(_: Any, x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x


# the operation that a block adds -> the call that the error names
MIXED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "running sums": (lambda _, x: x.cumsum(1) / 10, "cumsum"),
    "the mean": (lambda _, x: x.mean(1, keepdim=True), "mean"),
    "the mean, faintly": (lambda _, x: x.mean(1, keepdim=True) / 1e5, "mean"),
    "the largest": (lambda _, x: x.max(1, keepdim=True).values, "max"),
    "the first token": (lambda _, x: x[:, :1], "x[...]"),
    "rolled": (lambda _, x: x.roll(1, 1), "roll"),
    "flipped": (lambda _, x: x.flip(1), "flip"),
    "a convolution": (convolution, "pad"),
    "a token shift": (lambda _, x: F.pad(x, (0, 0, 1, -1)), "pad"),
    "sorted": (lambda _, x: x.sort(1).values, "sort"),
    "softmax over positions": (lambda _, x: x * torch.softmax(x, 1), "softmax"),
    "attention by hand": (attention_by_hand, "matmul"),
    "a norm over positions": (lambda _, x: x / x.norm(dim=(1, 2), keepdim=True), "norm"),
    "the mean of everything": (lambda block, x: torch.tanh(block.inner(x) - x.mean()), "mean"),
    "a table by position": (lambda block, x: block.table[: x.shape[1]].expand_as(x), "x[...]"),
    "positions counted anew": (lambda _, x: x * torch.arange(x.shape[1])[:, None], "arange"),
    "the number of positions": (lambda _, x: x / x.shape[1], "div"),
    "a gradient's norm": (hidden_gradient, "parts differ from the whole by"),
    "attention to the first three": (
        lambda _, x: F.scaled_dot_product_attention(x, x[:, :3], x[:, :3]),
        "combines positions",
    ),
    "noise": (lambda _, x: torch.randn_like(x), "draws random numbers itself"),
}
LOCAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a norm per position": lambda block, x: torch.tanh(block.inner(x)) * x.norm(dim=-1, keepdim=True),
    "a second attention": lambda block, x: F.scaled_dot_product_attention(x, block.inner(x), x),
}


def mixing(mix: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: LM(2, lambda: Mixing(mix))


class Gated(Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * torch.sigmoid(gate)


class Faint(nn.Module):
    """A block that mixes positions by a factor that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = Block(), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.factor * x.mean(1, keepdim=True)


class Weighing(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.use = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), use

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x)
        return x + y * self.use(weights)[..., None]


def between(how: Callable[[Any, Tensor, Tensor, int], Tensor]) -> Callable[[], nn.Module]:
    """Return a builder of a model with how(model, hidden states, embedded states, number) before each block."""

    def through(model: Any, x: Tensor) -> Tensor:
        first = x
        for i, block in enumerate(model.blocks):
            x = block(how(model, x, first, i))
        return x

    return doing(through)


def gates(model: Any, x: Tensor) -> Tensor:
    gate = torch.sin(x)
    for block in model.blocks:
        x = block(x, gate)
        gate = torch.sin(x)
    return x


def gates_by_a_layer(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x, model.gate(x))
    return x


def skips(model: Any, x: Tensor) -> Tensor:
    x = model.blocks[0](x)
    return model.blocks[2](model.blocks[1](x) + x)


class ByHand(nn.Module):
    """A causal attention without scaled_dot_product_attention. The caller may give a bias for the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.far = nn.Parameter(torch.randn(LENGTH) / 4)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        far = torch.arange(length)[:, None] - torch.arange(length)
        bias = self.far[far.abs()] if bias is None else bias
        scores = (q @ k.transpose(-2, -1) + bias).masked_fill(far < 0, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), bias


class Biased(Block):
    """A block that attends by hand, with the bias of the previous block."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = ByHand()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, bias = self.attn(self.ln1(x), bias)
        return x + y + self.mlp(self.ln2(x)), bias


def biased(model: Any, x: Tensor) -> Tensor:
    bias = None
    for block in model.blocks:
        x, bias = block(x, bias)
    return x


class Attending(nn.Module):
    """A block that is only an attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = ByHand()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)[0]


class Decoding(Block):
    """A block that also attends to the memory, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        if memory is None:
            return x
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.q(x), *self.kv(memory).chunk(2, -1)))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def encoder_and_decoder(length: int) -> Callable[[], nn.Module]:
    """Return a builder of a model whose first block encodes `length` positions, to which the other blocks attend."""

    def through(model: Any, x: Tensor) -> Tensor:
        memory = model.ln(model.blocks[0](x[:, :length]))
        for block in model.blocks[1:]:
            x = block(x, memory)
        return x

    return doing(through, block=Decoding)


def pooled(model: Any, x: Tensor) -> Tensor:
    x = model.through(x, range(3))
    return x + x.mean(1, keepdim=True)


EQUAL: dict[str, Callable[[], nn.Module]] = {
    **{name: mixing(mix) for name, mix in LOCAL.items()},
    "plain": LM,
    "nanoGPT": NanoGPT,
    "a skip around a block": doing(skips),
    "the mean after the blocks": doing(pooled),
    "gates of the hidden states": doing(gates, block=Gated),
    "a scale before later blocks": between(lambda model, x, _, i: x * model.scale[i] if i else x),
    "a layer between blocks": between(lambda model, x, _, i: model.gate(x) if i else x),
    "attention by hand in a module, its bias for all blocks": doing(biased, block=Biased),
    "an encoder as long as its decoder": encoder_and_decoder(LENGTH),
    "an encoder as long as a part": encoder_and_decoder(LENGTH // 2),
    "weights of attention, by position": lambda: LM(2, lambda: Weighing(lambda weights: weights.max(-1).values)),
}
# model -> words of the error
BETWEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the mean between blocks": (between(lambda _, x, __, i: x + x.mean(1, keepdim=True)), "'blocks.0' and 'blocks.1'"),
    "a table between blocks": (
        between(lambda model, x, _, i: x + model.table[: x.shape[1]]),
        "combines positions between",
    ),
    "rolled between blocks": (between(lambda _, x, __, i: x.roll(1, 1) if i == 2 else x), "'blocks.1' and 'blocks.2'"),
    "the embedding again": (between(lambda _, x, first, i: x + first), "does not run on a part"),
    "a scale before all blocks": (
        between(lambda model, x, _, i: x * model.scale[i]),
        "'scale' is used both inside and outside",
    ),
    "a gate by a layer": (doing(gates_by_a_layer, block=Gated), "'gate."),
    "a penalty on the weights": (doing(penalty), "mlp.up.weight' is used both inside and outside of the blocks"),
    "mixed by a factor of zero": (lambda: LM(2, Faint), "mean"),
    "weights of attention, summed": (lambda: LM(2, lambda: Weighing(lambda weights: weights.sum(1))), "'blocks.0'"),
    "no attention": (lambda: LM(2, MLP), "No block calls F.scaled_dot_product_attention"),
    "nothing but attention by hand": (lambda: LM(2, Attending), "arange in attn"),
}


class Dropping(Block):
    """A block whose attention has dropout. It is tried in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.p = 0.2


def test_attention_with_dropout_is_accepted() -> None:
    model = built(lambda: LM(2, Dropping))
    found = try_in_parts(model, ["blocks.0", "blocks.1"], lambda: model(rows(1)[0][0][None]))
    assert found.refused is None


REFUSED = {name: (mixing(mix), text) for name, (mix, text) in MIXED.items()} | BETWEEN
# Another part of the trial refuses each: a block, its gradient, the code between blocks, weights.
TRAINED = ("the mean", "a gradient's norm", "a table between blocks", "a penalty on the weights", "no attention")


# The trial finds these by the same numbers as others, so only `make long` tries them.
ALIKE = ("the mean, faintly", "the largest", "rolled", "flipped", "a token shift", "sorted", "softmax over positions",
         "the mean of everything", "positions counted anew", "rolled between blocks")  # fmt: skip
NAMED = [name for name in REFUSED if name not in TRAINED[:2]]


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in ALIKE else n for n in NAMED])
def test_the_cause_of_mixed_positions_is_named(name: str) -> None:
    make, text = REFUSED[name]
    model, ids = built(make), torch.stack([row[0] for row in rows(2)])
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]  # type: ignore[arg-type]

    assert text in str(try_in_parts(model, blocks, lambda: model(ids)).refused)


# One model mixes positions after the blocks, one has an encoder with as many positions as a part, and one needs the
# offset of a part.
SAMPLE = ["the mean after the blocks", "an encoder as long as a part",
          "attention by hand in a module, its bias for all blocks"]  # fmt: skip
REST = [name for name in EQUAL if name not in SAMPLE]


def table(world: Any, equal: list[str], refused: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    found = {name: verdict(EQUAL[name], "cp=2") for name in equal}
    found |= {name: verdict(REFUSED[name][0], "cp=2") for name in refused}
    found["a penalty in the loss"] = verdict(LM, "cp=2", loss_of=penalised)
    found["switched"] = verdict(mixing(MIXED["the mean"][0]), "cp=2", first="ddp")
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("equal", "refused"), [(SAMPLE, TRAINED[:2]), pytest.param(REST, TRAINED[2:], marks=pytest.mark.long)]
)
def test_models_that_mix_positions_are_refused_and_others_are_equal(equal: list[str], refused: tuple[str, ...]) -> None:
    said = {name: REFUSED[name][1] for name in refused}
    said |= {"a penalty in the loss": "is used both inside and outside of the blocks", "switched": "mean"}
    for found in run_ranks(table, 2, equal, refused, timeout=170):
        assert {name: found[name] for name in equal if found[name][0] != "equal"} == {}
        for name, text in said.items():
            kind, told = found[name]
            assert kind == "refused" and text in told, (name, kind, told)


def test_the_trial_does_not_change_the_model() -> None:
    model = built(mixing(MIXED["the mean"][0]))
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    values = [p.detach().clone() for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    found = try_in_parts(model, ["blocks.0", "blocks.1"], lambda: model(rows(1)[0][0][None]))
    assert found.refused is not None and "mean" in str(found.refused)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert [p.requires_grad for p in model.parameters()] == flags and all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(part) or part._forward_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_between_the_blocks_are_found() -> None:
    model = built(EQUAL["a layer between blocks"])
    found = try_in_parts(model, [f"blocks.{i}" for i in range(3)], lambda: model(rows(1)[0][0][None]))
    assert found.refused is None and found.between == {"gate.weight", "gate.bias"}
    assert not any(way.in_parts or way.whole for way in found.ways.values()) and not found.begins
    model = built(EQUAL["gates of the hidden states"])
    found = try_in_parts(model, [f"blocks.{i}" for i in range(3)], lambda: model(rows(1)[0][0][None]))
    assert [sorted(way.in_parts) for way in found.ways.values()] == [[], ["gate"], ["gate"]] and not found.between


def test_the_trial_finds_chains_and_modules_that_need_all_positions() -> None:
    ids, blocks = rows(1)[0][0][None], [f"blocks.{i}" for i in range(3)]
    model = built(EQUAL["attention by hand in a module, its bias for all blocks"])
    ways = try_in_parts(model, blocks, lambda: model(ids)).ways
    assert [sorted(way.whole) for way in ways.values()] == [["attn"]] * 3
    assert [sorted(way.in_parts) for way in ways.values()] == [[], ["bias"], ["bias"]]
    for length in (LENGTH, 5):
        model = built(encoder_and_decoder(length))
        found = try_in_parts(model, blocks, partial(model, ids))
        assert found.begins == {"blocks.1"}
        assert [(sorted(way.uncut), sorted(way.across)) for way in found.ways.values()] == [
            ([], []),
            (["memory"], [1]),
            (["memory"], [1]),
        ]


class Telling(Block):
    """A block that returns its hidden states, and two unused numbers for each position."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, x[..., :2].flatten(1)


def told(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x, _ = block(x)
    return x


def test_causal_attention_gets_balanced_parts_if_they_give_right_results() -> None:
    ids, blocks = rows(1)[0][0][None], ["blocks.0", "blocks.1"]
    causal, told_too = built(lambda: LM(2)), built(doing(told, block=Telling))
    both_ways = built(lambda: LM(2, lambda: Weighing(lambda weights: weights.max(-1).values)))
    assert try_in_parts(causal, blocks, partial(causal, ids)).balanced is True
    assert try_in_parts(both_ways, blocks, partial(both_ways, ids)).balanced is None
    # Only contiguous parts join these numbers in the right order.
    found = try_in_parts(told_too, [f"blocks.{i}" for i in range(3)], partial(told_too, ids))
    assert found.refused is None and found.balanced is False


class Passing(Around):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def test_arguments_keep_their_names_if_another_strategy_wraps_the_block() -> None:
    block = Decoding()
    put_around(block, Passing)
    assert argument_names(block.forward) == ["x", "memory"]


@pytest.mark.long
def test_check_gives_the_same_results_without_ranks() -> None:
    batch = tuple(torch.stack(part) for part in zip(*rows(4), strict=True))
    refused = nbkit.check(built(encoder_and_decoder(5)), "cp=2 pp=2", batch, 4)
    assert not refused.ok and "has several chains of blocks" in str(refused)
    for name, (mix, text) in list(MIXED.items())[:3]:
        refused = nbkit.check(built(mixing(mix)), "cp=2", batch, 2)
        assert not refused.ok and text in str(refused), name
    assert nbkit.check(built(EQUAL["a layer between blocks"]), "cp=2", batch, 2).ok
