"""Test that a census counts the bytes that the plan of each switch moves, rank by rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.plan import RankLayouts, make_plan
from nbkit.rank.train.estimate.state_bytes import StateBytes
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout


class Counting(GPT):
    """A GPT with a buffer in each block and a tied embedding. Its odd sizes make uneven shards."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocab=37, block=8, layers=6, heads=4, width=20))
        self.head.weight = self.tokens.weight
        for block in self.blocks:
            block.register_buffer("seen", torch.zeros(3))


KINDS = {"weight": 4, "exp_avg": 4, "exp_avg_sq": 8}


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    model: nn.Module = Counting()
    ids = torch.randint(37, (2, 8))
    chain = find_chain(model, lambda: model(ids))
    return ModelFacts(ModelShapes(skeleton_of(model)), chain, costs=(1.0,) * len(chain))


def holdings(rank_layouts: RankLayouts) -> list[dict[str, Layout]]:
    return [
        {f"weight/{name}": layout for name, layout in weights.items()}
        | {f"buffer/{name}": layout for name, layout in buffers.items()}
        | {f"{kind}/{name}": layout for name, layout in held.items() for kind in KINDS if kind != "weight"}
        for weights, held, buffers in zip(rank_layouts.weights, rank_layouts.held, rank_layouts.buffers, strict=True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.long)])
def test_the_census_equals_the_exchange_plan_for_every_pair_of_strategies(facts: ModelFacts, ranks: int) -> None:
    names = [name for name, _ in facts.shapes.skeleton.named_parameters()]
    census = StateBytes(facts, dict.fromkeys(names, KINDS), set(names))
    every = [one for one in Strategy.every(ranks, schedules=("1f1b", "zbv")) if one.tp in (1, 2, 4)]
    assert len(every) > 20
    checked = 0
    for old in every[::3]:
        for new in every[1::4]:
            before, after = holdings(make_plan(old, facts).layouts), holdings(make_plan(new, facts).layouts)
            sizes = {key: KINDS.get(key.partition("/")[0], 4) for one in (*before, *after) for key in one}
            plan, flow = ExchangePlan.of(before, after, sizes), census.flow(old, new)
            assert flow.received == plan.bytes, (old, new)
            whole = tuple(sum(layout.numel * sizes[key] for key, layout in one.items()) for one in after)
            assert tuple(map(sum, zip(flow.received, flow.kept, strict=True))) == whole, (old, new)
            checked += bool(flow.total)
    assert checked > 20


def test_tensors_with_owners_are_counted_at_their_owners(facts: ModelFacts) -> None:
    names = [name for name, _ in facts.shapes.skeleton.named_parameters()]
    matrices = frozenset(name for name in names if len(facts.shapes.whole[name].shape) == 2)
    options = JobOptions(whole=matrices, whole_in_tp=matrices)
    census = StateBytes(facts, dict.fromkeys(names, KINDS), set(names), options=options)
    texts = ("zero1", "zero3", "dp=4 zero=3 shard=2", "dp=2 tp=2", "zero2", "pp=2 dp=2 zero=1", "ddp", "tp")
    plans = [make_plan(Strategy.parse(text, 4), facts, options) for text in texts]
    assert sum(bool(plan.owned) for plan in plans) == 7
    for old, new in pairwise(plans):
        before, after = holdings(old.layouts), holdings(new.layouts)
        sizes = {key: KINDS.get(key.partition("/")[0], 4) for one in (*before, *after) for key in one}
        flow = census.flow(old.strategy, new.strategy)
        assert flow.received == ExchangePlan.of(before, after, sizes).bytes, (old.strategy, new.strategy)
        whole = tuple(sum(layout.numel * sizes[key] for key, layout in one.items()) for one in after)
        assert tuple(map(sum, zip(flow.received, flow.kept, strict=True))) == whole
    for plan in plans:
        for rank, rest in enumerate(census.at_rest(plan.strategy)):
            held, own = plan.layouts.held[rank], [name for name, owner in plan.owners.items() if owner == rank]
            assert rest.optimizer == 12 * sum(layout.numel for layout in held.values()), plan.strategy
            wholes = sum(held[name].numel for name in own)
            parts = sum(layout.numel for layout in plan.layouts.weights[rank].values())
            assert rest.parameters == 4 * (parts + wholes), plan.strategy
            if plan.owners or plan.strategy.zero == 2:  # only the owner holds its tensors
                assert rest.gradients == 4 * sum(layout.numel for layout in held.values()), plan.strategy


def test_ranks_that_hold_the_same_share_a_row(facts: ModelFacts) -> None:
    names = [name for name, _ in facts.shapes.skeleton.named_parameters()]
    blocks = [
        {name: p.numel() for name, p in facts.shapes.skeleton.named_parameters() if name.startswith(f"blocks.{i}.")}
        for i in range(6)
    ]
    census = StateBytes(facts, dict.fromkeys(names, KINDS), set(names), blocks)

    rows, of_ranks = census.fractions(Strategy.parse("pp=2 dp=2", 4))
    assert rows == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]] and of_ranks == [0, 0, 1, 1]
    rows, of_ranks = census.fractions(Strategy.parse("zero3", 2))
    rank_layouts = make_plan(Strategy.parse("zero3", 2), facts).layouts
    for rank, held in enumerate(rank_layouts.held):
        expected = [sum(held[name].numel for name in block) / sum(block.values()) for block in blocks]
        assert rows[of_ranks[rank]] == pytest.approx(expected, abs=1e-4)
