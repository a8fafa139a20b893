"""Stages of unmodified models, chained by hand in one process, give the outputs and gradients of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from models_zoo import LENGTH, VOCAB, WIDTH, ZOO, Specimen, cross_entropy, gpt, hf_llama, next_tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nbkit.errors import StrategyError
from nbkit.rank.models.gpt import Block, GPTConfig
from nbkit.rank.parallel.chain import Chain, find_chain
from nbkit.rank.parallel.flow import tensors_in
from nbkit.rank.parallel.gates import plain_attention
from nbkit.rank.parallel.skeleton import homes, is_placeholder, replace, skeleton_of
from nbkit.rank.parallel.stages import Staged
from nbkit.rank.train.batch import call

Stage = tuple[Staged, int]


def staged(model: nn.Module, chain: Chain, ranges: Sequence[tuple[int, int]]) -> Staged:
    """A rank's part, made as a strategy makes it: cut without memory, then given the weights that it holds."""
    part = Staged(skeleton_of(model), chain, ranges)
    weights = dict(model.named_parameters())
    held = homes(part.module)
    assert set(held) == part.holds == {name for name, _ in part.module.named_parameters()}
    assert all(is_placeholder(p) for p in part.module.parameters() if p.numel() > 1)
    for name, places in held.items():
        replace(places, nn.Parameter(weights[name].detach().clone(), requires_grad=weights[name].requires_grad))
    return part


def chained(stages: Sequence[Stage], specimen: Specimen, value: Any, target: Any) -> tuple[Any, dict[str, Tensor]]:
    """(output, name -> gradient summed over the stages), hidden states and their gradients passed by hand."""
    for part, _ in stages:
        part.module.zero_grad()
    sent: Any = ()
    links: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for part, index in stages:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in sent)
        links.append((sent, received))
        sent = part.forward(index, value, received)
    specimen.loss(sent, target).backward()
    for out, received in reversed(links):
        pairs = [(o, r.grad) for o, r in zip(out, received, strict=True) if o.requires_grad and r.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    grads: dict[str, Tensor] = {}
    for part in {id(part): part for part, _ in stages}.values():
        for name, p in part.module.named_parameters():
            if p.grad is not None:
                grads[name] = grads[name] + p.grad if name in grads else p.grad.clone()
    return sent, grads


def assert_equal(found: tuple[Any, dict[str, Tensor]], whole: tuple[Any, dict[str, Tensor | None]]) -> None:
    for a, b in zip(tensors_in(found[0]), tensors_in(whole[0]), strict=True):
        assert (a - b).abs().max() <= 1e-12
    expected = {name: g for name, g in whole[1].items() if g is not None}
    assert found[1].keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert (found[1][name] - grad).abs().max() <= 1e-12 * scale, name


def partitions(num: int, stages: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *inner, num))) for inner in combinations(range(1, num), stages - 1)]


@pytest.mark.parametrize("name", ZOO)
def test_every_partition_of_every_model_equals_the_whole(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.build(torch.float64)
    value, target = specimen.batch(3, dtype=torch.float64)
    chain = find_chain(model, lambda: call(model, value))
    assert chain.blocks == specimen.blocks
    whole = specimen.gradients(model, value, target)
    parts = {(lo, hi): staged(model, chain, [(lo, hi)]) for lo, hi in combinations(range(len(chain) + 1), 2)}
    for num in (1, 2, 3, 4):
        for ranges in partitions(len(chain), num):
            assert_equal(chained([(parts[r], 0) for r in ranges], specimen, value, target), whole)
            # Each parameter is on one stage, but for a weight that embedding and head share.
            held = sorted(name for r in ranges for name in parts[r].holds)
            tied = [name for name in chain.before if name in chain.after] * (num > 1)
            assert held == sorted([*whole[1], *tied])


@pytest.mark.parametrize("name", ["gpt2_padded", "llama_tied", "encoder", "pairs", "ten_convs"])
def test_several_stages_on_a_rank_other_shapes_and_evaluation(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.build(torch.float64)
    chain = find_chain(model, lambda: call(model, specimen.batch(3, dtype=torch.float64)[0]))
    n = len(chain)
    outer, inner = staged(model, chain, [(0, 1), (3, n)]), staged(model, chain, [(1, 2), (2, 3)])
    order = [(outer, 0), (inner, 0), (inner, 1), (outer, 1)]
    for rows in (3, 2, 5):
        value, target = specimen.batch(rows, seed=rows, dtype=torch.float64)
        assert_equal(chained(order, specimen, value, target), specimen.gradients(model, value, target))
    for part in (model, outer.module, inner.module):
        part.eval()
    with torch.no_grad():
        sent: Any = ()
        for part, index in order:
            sent = part.forward(index, value, sent)
        with plain_attention():  # torch's fast path clears what is padding, which the layers alone do not
            expected = call(model, value)
    for a, b in zip(tensors_in(sent), tensors_in(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_ten_convolutions_in_five_stages_of_two() -> None:
    specimen = ZOO["ten_convs"]
    model = specimen.build(torch.float64)
    value, target = specimen.batch(4, dtype=torch.float64)
    chain = find_chain(model, lambda: model(value))
    ranges = [(i, i + 2) for i in range(0, 10, 2)]
    parts = [staged(model, chain, [r]) for r in ranges]
    assert_equal(
        chained([(part, 0) for part in parts], specimen, value, target), specimen.gradients(model, value, target)
    )
    for i, part in enumerate(parts):
        convs = {int(name.split(".")[1]) for name in part.holds if name.startswith("convs")}
        assert convs == {2 * i, 2 * i + 1}


def test_one_range_is_the_unmodified_model() -> None:
    model = gpt()
    chain = find_chain(model, lambda: model(next_tokens(2, torch.Generator())[0]))
    before = {name: type(part) for name, part in model.named_modules()}
    whole = Staged(model, chain, [(0, 4)])
    assert before == {name: type(part) for name, part in model.named_modules()}
    assert whole.holds == {name for name, _ in model.named_parameters()}


def test_the_classes_and_names_of_gated_modules_stay() -> None:
    model = gpt()
    chain = find_chain(model, lambda: model(next_tokens(2, torch.Generator())[0]))
    assert all(type(block) is Block for block in model.blocks)
    part = staged(model, chain, [(1, 3)])
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in part.module.blocks)
    assert {name.split(".")[1] for name, _ in part.module.named_parameters()} == {"1", "2"}
    assert part.module.blocks[0].up.weight is None and part.module.head.weight is None


class Careless(nn.Module):
    """Changes what it is given in place, reads a table of the model, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor, *, memory: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.linear(self.norm(torch.relu_(x) + table + memory.mean(0)))


class Decoder(nn.Module):
    """Gives every block the same memory, from an encoder of its own, and a table that all of them use."""

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


def test_memory_for_all_blocks_shared_tables_parameters_between_blocks_and_changes_in_place() -> None:
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
            assert_equal(chained([(parts[r], 0) for r in ranges], specimen, value, target), whole)
    assert torch.equal(parts[1, 2].module.blocks[0].norm.running_mean, buffers["blocks.0.norm.running_mean"])


def test_lora_on_a_llama_trains_only_its_adapters_through_frozen_stages() -> None:
    from peft import LoraConfig, get_peft_model

    def lora() -> nn.Module:
        model = get_peft_model(hf_llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_()
        return model

    specimen = Specimen(
        lora, lambda rows, draw: ({"input_ids": (t := next_tokens(rows, draw))[0]}, t[1]), ZOO["llama"].loss, ()
    )
    model = specimen.build(torch.float64)
    value, target = specimen.batch(3)
    chain = find_chain(model, lambda: call(model, value))
    assert len(chain) == 4
    parts = [staged(model, chain, [r]) for r in ((0, 1), (1, 3), (3, 4))]
    found = chained([(part, 0) for part in parts], specimen, value, target)
    whole = specimen.gradients(model, value, target)
    assert_equal(found, whole)
    assert len(found[1]) == 16 and all("lora" in name for name in found[1])


def test_recomputed_blocks_and_frozen_ones() -> None:
    specimen = ZOO["gpt"]
    model = specimen.build(torch.float64)
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    value, target = specimen.batch(3)
    chain = find_chain(model, lambda: model(value))
    parts = [staged(model, chain, [r]) for r in ((0, 1), (1, 3), (3, 4))]
    for part in parts:
        for block in part.module.blocks:

            def again(*args: Any, run: Any = block.forward) -> Any:
                return checkpoint(run, *args, use_reentrant=False)

            block.forward = again
    assert_equal(
        chained([(part, 0) for part in parts], specimen, value, target), specimen.gradients(model, value, target)
    )


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(GPTConfig(width=WIDTH)) for _ in range(3))
        self.skips = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks[: 1 if self.skips else 3]:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_a_model_does_otherwise_than_when_it_was_cut_is_an_error_with_names() -> None:
    model = Recomputes()
    ids = next_tokens(2, torch.Generator())[0]
    chain = find_chain(model, lambda: model(ids))
    part = staged(model, chain, [(1, 3)])
    output = part.forward(0, ids, (torch.randn(2, LENGTH, WIDTH, requires_grad=True),))
    with pytest.raises(StrategyError, match=r"blocks\.\d is called outside of a stage's forward"):
        output.sum().backward()
    part.module.skips = True
    with pytest.raises(StrategyError, match=r"did not come to blocks\.1"):
        part.forward(0, ids, (torch.randn(2, LENGTH, WIDTH),))
    part.module.skips = False
    assert part.forward(0, ids, (torch.randn(2, LENGTH, WIDTH),)).shape == (2, LENGTH, WIDTH)
