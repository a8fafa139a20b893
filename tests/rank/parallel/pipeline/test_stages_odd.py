"""Test stages of unusual models: shared memory and weights, own masks, changes in place, own checkpointing."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from staging import assert_equal, chained, partitions, staged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import StrategyError
from nbkit.rank.models.gpt import Block, GPTConfig
from nbkit.rank.parallel.check_model import check
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from verify.models import odd
from verify.models.specimens import LENGTH, VOCAB, WIDTH, ZOO, Specimen, cross_entropy, next_tokens


class Careless(nn.Module):
    """A block that changes its input in place, reads a table, keeps statistics, and has an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, table: Tensor, *, memory: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.linear(self.norm(torch.relu_(x) + table + memory))


class Decoder(nn.Module):
    """A model that gives all blocks the same memory, from its own encoder, and the same table."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.front = nn.Linear(6, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.randn(layers))
        self.blocks = nn.ModuleList(Careless() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.tanh(self.front(x))
        x = memory * 2
        for scale, block in zip(self.scale, self.blocks, strict=True):
            x = block(x, self.table, memory=memory) * scale
        return self.head(x)


def test_stages_with_shared_memory_parameters_and_in_place_changes_are_right() -> None:
    specimen = Specimen(Decoder, ZOO["sequential"].sample, cross_entropy, ())
    model = specimen.build(torch.float64)
    value, target = specimen.batch(6, dtype=torch.float64)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    chain = find_chain(model, lambda: model(value))
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert chain.entries[2].carried == ("[0][0]", "[1]['memory']") and chain.entries[2].written == {"[0][0]"}
    assert chain.entries[2].kept == {"[1]['memory']": "[1]['memory']"}
    parts = {(lo, hi): staged(model, chain, [(lo, hi)]) for lo, hi in combinations(range(5), 2)}
    whole = specimen.gradients(copy.deepcopy(model), value, target)
    for num in (2, 3, 4):
        for ranges in partitions(4, num):
            assert all({"table", "scale"} <= parts[r].holds for r in ranges)
            assert all({f"blocks.{i}.unused" for i in range(*r)} <= parts[r].holds for r in ranges)
            assert sum("front.bias" in parts[r].holds for r in ranges) == 1
            assert_equal(chained([(parts[r], 0) for r in ranges], specimen, value, target), whole)
    assert torch.equal(parts[1, 2].module.blocks[0].norm.running_mean, buffers["blocks.0.norm.running_mean"])


@pytest.mark.parametrize("how", [odd.penalty_between, odd.shapes, odd.penalty])
def test_stages_can_use_shapes_and_penalties_of_weights_of_other_stages(how: Any) -> None:
    specimen = Specimen(odd.doing(how), _ids, cross_entropy, ())
    model = specimen.build(torch.float64)
    value, target = specimen.batch(2, dtype=torch.float64)
    chain = find_chain(model, lambda: model(value))
    whole = specimen.gradients(copy.deepcopy(model), value, target)
    for num in (2, 3):
        for ranges in partitions(3, num):
            stages = [(staged(model, chain, [r]), 0) for r in ranges]
            assert_equal(chained(stages, specimen, value, target), whole)


def _ids(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    ids, targets = (torch.randint(odd.VOCAB, (rows, odd.LENGTH), generator=draw) for _ in range(2))
    return ids, targets


class Recomputes(nn.Module):
    """A model that checkpoints. how: "each" block; "reentrant" for each block; "two": the first two in one segment."""

    def __init__(self, how: str = "each") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(GPTConfig(width=WIDTH)) for _ in range(3))
        self.numbers, self.how = (0, 1, 2), how

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.how == "two":
            return self.blocks[2](checkpoint(self.first_two, x, use_reentrant=False))
        for block in (self.blocks[i] for i in self.numbers):
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x

    def first_two(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def test_stages_recompute_the_blocks_that_the_model_recomputes() -> None:
    specimen = Specimen(Recomputes, next_tokens, lambda output, _: output.square().mean(), ())
    model = specimen.build(torch.float64)
    batches = [specimen.batch(rows, seed=rows, dtype=torch.float64) for rows in (2, 3)]
    chain = find_chain(model, lambda: model(batches[0][0]))
    assert chain.recomputes
    for ranges in (*partitions(3, 2), *partitions(3, 3)):
        stages = [(staged(model, chain, [r]), 0) for r in ranges]
        for value, target in batches:
            whole = specimen.gradients(copy.deepcopy(model), value, target)
            assert_equal(chained(stages, specimen, value, target), whole)


def test_each_micro_batch_is_recomputed_from_its_own_input() -> None:
    model = Recomputes().double()
    ids = next_tokens(2, torch.Generator())[0]
    part = staged(model, find_chain(model, lambda: model(ids)), [(1, 3)])
    given = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outputs = [part.forward(0, ids, (hidden,)) for hidden in given]
    for output, hidden in zip(outputs, given, strict=True):
        same = hidden.detach().requires_grad_()
        (expected,) = torch.autograd.grad(model.blocks[2](model.blocks[1](same)).square().sum(), same)
        output.square().sum().backward()
        assert (hidden.grad - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("reentrant", "by reentrant checkpointing"),
        ("two", "in a segment with the block behind it"),
    ],
)
def test_a_recomputation_that_no_stage_can_make_is_refused_beforehand(how: str, why: str) -> None:
    model = Recomputes(how)
    ids = next_tokens(4, torch.Generator())
    found = check(model, "pp=2", ids, 2)
    assert not found.ok and "The model recomputes 'blocks.0' by itself, and a stage of" in str(found)
    assert why in str(found)


def test_a_model_that_calls_other_blocks_than_when_cut_is_an_error_with_names() -> None:
    model = Recomputes()
    ids = next_tokens(2, torch.Generator())[0]
    chain = find_chain(model, lambda: model(ids))
    part = staged(model, chain, [(1, 3)])
    hidden = (torch.randn(2, LENGTH, WIDTH),)
    with pytest.raises(StrategyError, match=r"blocks\.1 was called outside of the forward pass of its stage"):
        part.module.blocks[1](hidden[0])
    for numbers in ((0,), (0, 2)):
        part.module.numbers = numbers
        with pytest.raises(StrategyError, match=r"did not call blocks\.1"):
            part.forward(0, ids, hidden)
    part.module.numbers = (0, 1, 2)
    assert part.forward(0, ids, hidden).shape == (2, LENGTH, WIDTH)


class Front(nn.Module):
    """A front that returns a tensor that depends on its parameters, and a mask that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(ids) + self.start, (ids > VOCAB // 2).to(self.start.dtype)[..., None]


class Masked(nn.Module):
    """A model whose front also makes a mask. A later block gets the first block's output; two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Front()
        self.blocks = nn.ModuleList(Mix() for _ in range(6))
        self.blocks[4].linear.weight = self.blocks[1].linear.weight
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.front(ids)
        first = None
        for i, block in enumerate(self.blocks):
            x = block(x * mask, first if i == 3 else None)
            first = x if first is None else first
        return self.head(x)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None) -> Tensor:
        return torch.tanh(self.linear(x) if other is None else self.linear(x) + other)


@pytest.mark.parametrize("autocast", [False, True])
def test_stages_with_masks_of_a_front_late_use_and_shared_weights_are_right(autocast: bool) -> None:
    specimen = Specimen(Masked, next_tokens, cross_entropy, ())
    dtype = torch.float32 if autocast else torch.float64
    model = specimen.build(dtype)
    value, target = specimen.batch(3, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        chain = find_chain(model, lambda: model(value))
        assert len(chain) == 6 and [len(entry.skips) for entry in chain.entries] == [0, 1, 1, 0, 0, 0]
        assert chain.entries[3].carried == ("[0][0]", "[0][1]")
        assert "front" not in chain.skipped and "front.tokens" in chain.skipped
        parts = {(lo, hi): staged(model, chain, [(lo, hi)]) for lo, hi in combinations(range(7), 2)}
        # As on a separate rank, the model must not reuse the casts that autocast has cached.
        torch.clear_autocast_cache()
        whole = specimen.gradients(model, value, target)
        for ranges in (r for num in (2, 3, 6) for r in partitions(6, num)):
            found = chained([(parts[r], 0) for r in ranges], specimen, value, target)
            if not autocast:
                assert_equal(found, whole)
            assert torch.equal(found[0], whole[0]) and found[1].keys() == whole[1].keys()


class Towers(nn.Module):
    """A model of two towers from one table, with a skip between them. It uses the first after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        query, document = self.tokens(ids), self.tokens(ids.flip(1))
        for layer in self.first:
            query = layer(query).tanh()
        skip = document.sin() + query.mean(1, keepdim=True)
        for layer in self.second:
            document = layer(document).tanh()
        return self.head(document * query + skip.cos())


def test_two_towers_and_their_gradients_are_sent_together() -> None:
    specimen = Specimen(Towers, next_tokens, cross_entropy, ())
    model = specimen.build(torch.float64)
    value, target = specimen.batch(3, dtype=torch.float64)
    chain = find_chain(model, lambda: model(value))
    assert [{skip.module: skip.call for skip in entry.skips} for entry in chain.entries] == [
        {},
        {"tokens": 1},
        {"first.1": 0, "tokens": 1},
        {"first.1": 0, "tokens": 1},
    ]
    whole = specimen.gradients(copy.deepcopy(model), value, target)
    for ranges in (r for num in (2, 3, 4) for r in partitions(4, num)):
        stages = [(staged(model, chain, [r]), 0) for r in ranges]
        assert_equal(chained(stages, specimen, value, target), whole)
