"""Test that chains are found in unmodified models. A model that cannot be cut is refused, and the obstacles named."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.planner.stages import stage_ranges
from nbkit.rank.data.batch import call
from nbkit.rank.models.gpt import Block, GPTConfig
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.pipeline import layer_chain
from nbkit.rank.parallel.pipeline import layer_chain as chains
from nbkit.rank.parallel.pipeline.layer_chain import find_chain, measure_costs
from nbkit.rank.parallel.pipeline.trace_dataflow import StageInput
from nbkit.strategy import Strategy
from verify.models.specimens import VOCAB, WIDTH, ZOO, Uneven, gpt, hf_gpt2, next_tokens

IDS = next_tokens(2, torch.Generator().manual_seed(0))[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_blocks_by_structure_equal_the_blocks_found_by_a_run(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.build()
    assert tuple(structural_blocks(model)) == specimen.blocks
    chain = find_chain(model, lambda: call(model, specimen.batch(2)[0]))
    assert chain.blocks == chain.units == specimen.blocks and not chain.refused
    assert pickle.loads(pickle.dumps(chain)) == chain


def test_stem_head_and_wrappers_do_not_count_as_blocks() -> None:
    def leaves(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    parts = {"stem": leaves(6, 6, 6), "body": nn.ModuleList(leaves(6, 6, 6) for _ in range(3)), "head": leaves(6, 5, 5)}
    # A ModuleList only holds other modules: model.body is never called.
    assert structural_blocks(nn.ModuleDict({"model": nn.ModuleDict(parts)})) == [f"model.body.{i}" for i in range(3)]
    net = nn.Module()
    for name, part in parts.items():
        net.add_module(name, part)
    assert structural_blocks(nn.Sequential(net)) == ["0.body.0", "0.body.1", "0.body.2"]
    del net.body
    assert structural_blocks(net) == ["stem.0", "stem.1", "head.0", "head.1"]
    bare = nn.Module()
    bare.first, bare.between, bare.second = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
    assert structural_blocks(bare) == ["first", "second"] and structural_blocks(nn.Tanh()) == []


def test_a_chain_knows_tensors_across_cuts_and_parameters_of_each_part() -> None:
    model = ZOO["llama_tied"].build()
    chain = find_chain(model, lambda: call(model, ZOO["llama_tied"].batch(2)[0]))
    # Masks, rotary tables and position ids are inputs of the blocks too, but are not carried.
    assert [entry.carried for entry in chain.entries] == [("[0][0]",)] * 4
    assert chain.before == ("model.embed_tokens.weight",)
    assert chain.after == ("model.embed_tokens.weight", "model.norm.weight")
    assert chain.holds(0, 1) & chain.holds(3, 4) == {"model.embed_tokens.weight"}
    assert not chain.holds(0, 2) & chain.holds(2, 3)
    pairs = ZOO["pairs"].build()
    assert find_chain(pairs, lambda: pairs(IDS)).entries[2].carried == ("[0][0][0]", "[0][0][1]")


def test_find_chain_and_measure_costs_leave_the_model_unchanged() -> None:
    model = hf_gpt2(use_cache=True, resid_pdrop=0.1)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    kinds, weights = [type(part) for part in model.modules()], [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    cached: list[bool] = []

    def run() -> Any:
        cached.append(model.config.use_cache)
        return model(IDS)

    measure_costs(model, find_chain(model, run), lambda: run().logits, repeats=1)
    assert not any(cached)
    assert kinds == [type(part) for part in model.modules()] and model.training and model.config.use_cache
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["transformer.wte.weight"]
    assert bool((model.lm_head.weight.grad == 1).all())


def test_stages_named_by_the_user_are_cut_or_refused_with_names() -> None:
    model = gpt(6)
    chain = find_chain(model, lambda: model(IDS), stages=["blocks.2", "blocks.4.norm1", "head"][:1])
    assert chain.blocks == ("", "blocks.2") and len(chain.units) == 6
    assert {"tokens.weight", "blocks.0.up.weight", "blocks.1.up.weight"} <= chain.holds(0, 1)
    assert {"blocks.2.up.weight", "blocks.5.up.weight", "norm.weight", "head.weight"} <= chain.holds(1, 2)
    assert find_chain(model, lambda: model(IDS), stages=["blocks.1", "norm", "head"]).blocks[2:] == ("norm", "head")
    with pytest.raises(StrategyError, match=r"'layers.2', but the model has no such module[\s\S]*blocks\.0, blocks\.1"):
        find_chain(model, lambda: model(IDS), stages=["layers.2"])
    with pytest.raises(StrategyError, match=r"in the order of their calls[\s\S]*blocks\.2, blocks\.4"):
        find_chain(model, lambda: model(IDS), stages=["blocks.4", "blocks.2"])
    with pytest.raises(StrategyError, match=r"called: blocks 0 x"):
        find_chain(model, lambda: model(IDS), stages=["blocks"])
    # The residual, a sum of the outputs of two modules, passes by the norm.
    (_, entry) = find_chain(model, lambda: model(IDS), stages=["blocks.4.norm2"]).entries
    assert [skip.module for skip in entry.skips] == ["blocks.3", "blocks.4.attention"]


class Skips(nn.Module):
    """A model that adds the output of `source` after the last block: "tokens", "scale" or a block's number."""

    def __init__(self, source: str | int, layers: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(GPTConfig(width=WIDTH)) for _ in range(layers))
        self.source = source

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.tokens(ids)
        if self.source == "scale":
            first = first * self.scale
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.source:
                first = x
        return x + first


@pytest.mark.parametrize(("source", "module"), [("tokens", "tokens"), (2, "blocks.2")])
def test_a_skip_connection_across_blocks_is_sent_as_the_output_of_its_module(source: str | int, module: str) -> None:
    model = Skips(source)
    chain = find_chain(model, lambda: model(IDS))
    assert len(chain) == 5 and not chain.refused
    crossing = [[skip.module for skip in entry.skips] for entry in chain.entries[1:]]
    assert crossing == ([[module]] * 4 if source == "tokens" else [[], [], [module], [module]])
    assert pickle.loads(pickle.dumps(chain)) == chain


def test_a_skip_connection_from_a_parameter_is_refused_by_name() -> None:
    model = Skips("scale")
    with pytest.raises(StrategyError) as raised:
        find_chain(model, lambda: model(IDS))
    text = str(raised.value)
    assert "nbkit cannot cut Skips into stages" in text and "stages=[" in text
    for i in range(1, 5):
        assert f"no stage can begin with blocks.{i}: Skips.forward computes a value before it, and Skips" in text
    assert "uses this value after it" in text


class Penalised(Skips):
    """A model that adds the norm of a weight of its first block to its output in training."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        penalty = self.blocks[0].up.weight.norm() if self.training else 0.0
        for block in self.blocks:
            x = block(x)
        return x + penalty


def test_a_skip_only_in_training_is_refused_and_modes_are_restored() -> None:
    model = Penalised("tokens")
    model.blocks[2].eval()
    with pytest.raises(StrategyError, match=r"begin with blocks\.1: in training, Penalised\.forward computes"):
        find_chain(model, lambda: model(IDS))
    assert [block.training for block in model.blocks] == [True, True, False, True, True]
    assert len(find_chain(model.eval(), lambda: model(IDS))) == 5


def test_a_skip_connection_across_some_blocks_allows_the_other_cuts() -> None:
    model = Halved()
    chain = find_chain(model, lambda: model(IDS))
    assert chain.blocks == ("blocks.0", "blocks.1", "blocks.2") and len(chain.units) == 5
    assert [name for name, _ in chain.refused] == ["blocks.3", "blocks.4"]
    assert {"blocks.3.up.weight", "blocks.4.up.weight"} <= chain.holds(2, 3)


class Halved(Skips):
    """A model that changes the output of its third block in place, and adds it again after the last block."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks[:3]:
            x = block(x)
        first = x.mul_(0.5)
        for block in self.blocks[3:]:
            x = block(x)
        return x + first


class Told(nn.Module):
    """A model that returns its output and the hidden states of all blocks, in an object unknown to torch."""

    class Output:
        def __init__(self, logits: Tensor, hidden: list[Tensor]) -> None:
            self.logits, self.hidden = logits, hidden

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.again = again

    def forward(self, x: Tensor) -> Any:
        hidden = []
        for layer in [*self.layers, *self.layers] if self.again else self.layers:
            x = layer(x)
            hidden.append(x)
        return self.Output(x, hidden)


def test_models_without_a_chain_are_refused_with_the_reason() -> None:
    told, again, x = Told(), Told(again=True), torch.randn(2, 6)
    assert [len(entry.skips) for entry in find_chain(told, lambda: told(x)).entries] == [0, 1, 2]
    with pytest.raises(StrategyError, match=r"layers\.0: the model calls it 2 times"):
        find_chain(again, lambda: again(x))
    one = nn.Linear(6, 6)
    with pytest.raises(StrategyError, match="it has no two blocks"):
        find_chain(one, lambda: one(x))


def test_a_wrongly_traced_chain_is_refused_by_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Skips("scale")
    monkeypatch.setattr(
        chains.DataflowTrace, "around", property(lambda self: {}, lambda self, value: None), raising=False
    )
    with pytest.raises(StrategyError, match="In stages, the model gives other results than as a whole"):
        find_chain(model, lambda: model(IDS))
    assert all(type(block) is Block for block in model.blocks)


class Clock:
    """A clock that advances only when `Costly` adds to it."""

    seconds = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.seconds


class Costly(nn.Module):
    """A layer with a cost in seconds for forward, twice that for backward, and more in the first `late` runs."""

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
            ctx.seconds = seconds
            Clock.seconds += seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            Clock.seconds += 2 * ctx.seconds
            return grad, None

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.late, self.linear = seconds, 0, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.late -= 1
        return self.Work.apply(self.linear(x), self.seconds + 8.0 * (self.late >= 0))


class Reminded(nn.Module):
    """A model that gives every block the same memory. Its front costs 5."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Costly(5)
        self.blocks = nn.ModuleList(map(Recalling, (4, 12, 4)))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.front(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Recalling(Costly):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + memory)


def test_costs_are_forward_and_backward_seconds_of_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_chain, "time", Clock)
    model = nn.Sequential(*map(Costly, (4, 12, 4, 40)))
    x = torch.randn(2, 6)
    chain = find_chain(model, lambda: model(x))
    for part in model:
        part.late = 2  # the warm-up run, and one more: the shortest run counts
    assert measure_costs(model, chain, lambda: model(x).square().mean()) == (12, 36, 12, 120)
    for part in model:
        part.late = 0
    model[0].linear.requires_grad_(False)
    model[1].linear.requires_grad_(False)
    assert measure_costs(model, chain, lambda: model(x), repeats=1) == (4, 12, 12, 120)
    reminded = Reminded()
    short = find_chain(reminded, lambda: reminded(x))
    assert measure_costs(reminded, short, lambda: reminded(x), repeats=1) == (27, 36, 12)
    model.requires_grad_(False)
    with pytest.raises(StrategyError, match="does not depend on its parameters"):
        measure_costs(model, chain, lambda: model(x))


def test_costs_of_a_real_model_are_positive() -> None:
    model = Uneven()
    chain = find_chain(model, lambda: model(IDS))
    measured = measure_costs(model, chain, lambda: model(IDS), repeats=1)
    assert len(measured) == 6 and all(seconds > 0 for seconds in measured)


def test_a_stage_input_can_be_pickled() -> None:
    entry = StageInput(("[0][0]",), {"[0][0]": "[0][1]"}, frozenset({"[0][0]"}))
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_equal_pieces_get_the_same_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_chain, "time", Clock)
    model = nn.Sequential(*map(Costly, (4, 4, 5, 4.5, 12, 4)))
    x = torch.randn(2, 6)
    chain = find_chain(model, lambda: model(x))

    # All but the fifth differ only by noise, the first and the last too. The fifth has another cost in each run.
    assert measure_costs(model, chain, lambda: model(x)) == (12.75, 12.75, 12.75, 12.75, 36, 12.75)
    model[2].linear = nn.Linear(6, 6, bias=False)  # another kind
    assert measure_costs(model, chain, lambda: model(x)) == (12, 12, 15, 12, 36, 12)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Fronted(nn.Module):
    """A model with four equal blocks between an embedding and a head, like a language model."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.front, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(_mlp(width) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.front(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_embedding_and_head_are_timed_separately_from_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_chain, "time", Clock)
    model = Fronted()
    ids = torch.zeros(4, 8, dtype=torch.long)
    chain = find_chain(model, lambda: model(ids))
    pauses = {"front": 1.0, "blocks.0": 5.0, "blocks.1": 5.0, "blocks.2": 5.0, "blocks.3": 5.0, "head": 2.0}
    for name, seconds in pauses.items():

        def pause(*_: Any, seconds: float = seconds) -> None:
            noise = random.random() if seconds > 2 else 0.0  # like a rank that shares its core
            Clock.seconds += seconds * (1 + noise)

        model.get_submodule(name).register_forward_hook(pause)
    random.seed(0)
    first, second, third, fourth = measure_costs(model, chain, lambda: model(ids))
    assert second == third and (first - second, fourth - second) == pytest.approx((1, 2))


@pytest.mark.long
@pytest.mark.parametrize("starts", [3, pytest.param(20, marks=pytest.mark.long)])
def test_four_equal_blocks_are_cut_equally_under_load_too(starts: int) -> None:
    model, strategy, threads = Fronted(), Strategy.parse("pp=2", 2), torch.get_num_threads()
    ids = torch.zeros(8, 32, dtype=torch.long)
    chain = find_chain(model, lambda: model(ids))
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(8)]
    torch.set_num_threads(1)  # like a rank with one core
    try:
        found = [stage_ranges(measure_costs(model, chain, lambda: model(ids)), strategy) for _ in range(starts)]
    finally:
        torch.set_num_threads(threads)
        for other in others:
            other.kill()
            other.wait()
    assert found == starts * [[(0, 2), (2, 4)]]
