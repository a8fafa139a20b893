"""Test that ranks built from a plan hold what it says, and equal plans have the same digest on every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import StrategyError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel import device_mesh, process_groups
from nbkit.rank.parallel.context.context_parallel import Positionwise
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import Coupled, ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.plan import ParallelPlan, make_plan, refusals
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan
from nbkit.rank.parallel.zero3.unit import Casts
from nbkit.rank.train.checkpoint import job_state
from nbkit.strategy import Strategy
from verify.models.specimens import ZOO

STRATEGIES = ("dp=2 tp=2 zero=1", "pp=2 dp=2 schedule=zbv microbatches=4", "hsdp shard=2", "cp=2 dp=2 zero=3")
MODELS = ("gpt_tied", "encoder")


def facts_of_a_gpt(heads: int = 2) -> ModelFacts:
    model = GPT(GPTConfig(vocab=32, block=8, layers=4, heads=heads, width=16))
    model.head.weight = model.tokens.weight
    ids = torch.randint(32, (2, 8))
    chain = find_chain(model, lambda: model(ids))
    return ModelFacts(ModelShapes(skeleton_of(model)), chain, costs=(1.0,) * len(chain))


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return facts_of_a_gpt()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def built(world: Any) -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Return {(model, strategy): (digest of its plan, differences between the plan and this rank)}."""
    found = {}
    rank = world.place.rank
    for name in MODELS:
        zoo = ZOO[name]
        job = nbkit.prepare(zoo.build, adam, loss=zoo.loss, hints=nbkit.ModelHints(example=zoo.batch(4)), log_dir=None)
        for text in STRATEGIES:
            strategy = Strategy.parse(text, 4)
            connections = job.builder.connect(strategy, alike=True)
            plan = job.builder.plan(strategy)
            model, _ = job.builder.build(plan, connections)
            held = {name: layout for name, layout in model.data.layouts.items() if name in model.held}
            weights = {key.partition("/")[2]: layout for key, (_, layout) in job_state.weights(model).items()}
            buffers = {key.partition("/")[2]: layout for key, (_, layout) in job_state.buffers(model).items()}
            layouts = plan.layouts
            pairs = ((held, layouts.held), (weights, layouts.weights), (buffers, layouts.buffers))
            wrong = [f"{what} {said[rank]}" for what, said in pairs if what != said[rank]]
            wrong += [axis for axis, size in (("tp", 2), ("pp", 2)) if strategy.mesh.degree(axis) not in (1, size)]
            members = {axis: [ranks for ranks in every if rank in ranks] for axis, every in plan.groups.items()}
            for axis, ((own,),) in ((axis, (ranks,)) for axis, ranks in members.items()):
                group = connections.axes.group(axis)
                if tuple(torch.distributed.get_process_group_ranks(group) if group else (rank,)) != tuple(sorted(own)):
                    wrong.append(f"{axis}: {own}")
            found[name, text] = plan.digest, wrong
            model.close()
    return found


@pytest.mark.usefixtures("known_to_be_right")
def test_all_ranks_have_the_same_plan_and_hold_what_it_says() -> None:
    everyone = run_ranks(built, 4, timeout=240)
    for case, (digest, _) in everyone[0].items():
        assert [found[case][1] for found in everyone] == [[]] * 4, case
        assert {found[case][0] for found in everyone} == {digest}, case
    assert len({digest for digest, _ in everyone[0].values()}) == len(MODELS) * len(STRATEGIES)


def test_plans_are_equal_only_if_ranks_build_the_same_from_them(facts: ModelFacts) -> None:
    strategy = Strategy(pp=2, microbatches=4)
    plan = make_plan(strategy, facts)
    assert plan == make_plan(strategy, facts_of_a_gpt()) and len({plan, make_plan(strategy, facts_of_a_gpt())}) == 1
    assert facts.chain is not None
    slow = replace(facts, costs=(9.0, *facts.costs[1:]))
    others = [
        make_plan(replace(strategy, microbatches=8), facts),
        make_plan(strategy, facts, JobOptions(recompute=True)),
        make_plan(strategy, facts, node_of=(0, 1)),
        make_plan(strategy, slow),
        make_plan(strategy, replace(facts, chain=replace(facts.chain, units=facts.chain.units[1:]))),
    ]
    assert plan.stages != others[3].stages
    assert len({plan, *others}) == 1 + len(others)
    # Plain data parallelism needs no blocks, so facts for other strategies do not change its plan.
    for options in (JobOptions(), JobOptions(recompute=True)):
        assert make_plan(Strategy(dp=2), facts, options) == make_plan(Strategy(dp=2), ModelFacts(facts.shapes), options)


def test_a_rank_has_at_most_five_communicators_on_three_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test with ranks of dp on two nodes, and a first and last stage that share a weight."""

    def group_of(axis: str, every: list[tuple[int, ...]], rank: int) -> Any:
        assert sorted(each for ranks in every for each in ranks) == list(range(64))  # one split makes them all
        own = next(ranks for ranks in every if rank in ranks)
        return (axis, own) if len(own) > 1 else None

    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: group[1].index(rank))
    monkeypatch.setattr(process_groups, "group_of", group_of)
    monkeypatch.setattr(device_mesh, "group_of", group_of)
    strategy = Strategy(dp=4, tp=4, pp=4, microbatches=4)
    plan = ParallelPlan(strategy, facts_of_a_gpt(heads=4), JobOptions(), tuple(rank // 8 for rank in range(64)))
    for rank in range(64):
        connections = process_groups.connect(plan, rank)
        groups = [*connections.axes.used(), connections.ordered, *(tied.group for tied in connections.ties)]
        made = sorted({group[0] for group in groups if group is not None})
        assert made == ["dp between nodes", "dp within nodes", "pp in order", "tp"]  # besides that of all ranks
        assert len(connections.ties) == (plan.strategy.mesh.index(rank)["pp"] in (0, 3))


def seen_by_a_rank(plan: ParallelPlan) -> str:
    """Return everything in `plan` that decides what a rank holds or sends."""
    facts, strategy = plan.facts, plan.strategy
    only_rows = strategy.mesh.size == strategy.dp and strategy.zero < 3
    read = [plan.layouts, plan.groups, plan.ties, plan.stages, plan.tensor, plan.gathers, plan.casts, plan.copies]
    read += [None if only_rows else facts.chain, facts.positionwise if strategy.cp > 1 else None]
    return repr([strategy, replace(plan.options, tp_plan=None), *read])


def test_plans_have_equal_digests_exactly_if_ranks_use_the_same_parts(facts: ModelFacts) -> None:
    assert facts.chain is not None
    names = facts.block_names
    known = [
        facts,
        replace(facts, costs=(9.0, *facts.costs[1:])),
        replace(facts, chain=replace(facts.chain, units=names[1:])),
        replace(facts, chain=replace(facts.chain, recomputes=True)),
        replace(facts, gathers=GatherPlan(names)),
        replace(facts, gathers=GatherPlan(names, ahead=2)),
        replace(facts, gathers=GatherPlan(names, casts=Casts(torch.bfloat16, frozenset({"tokens.weight"})))),
        replace(facts, positionwise=Positionwise(balanced=True)),
        replace(facts, positionwise=Positionwise(between=frozenset({"tokens.weight"}))),
    ]
    options = [
        JobOptions(),
        JobOptions(tp_plan={"blocks.*.up": "replicate", "blocks.*.down": "replicate"}),
        *(JobOptions(**{name: True}) for name in ("recompute", "cut", "compile", "adaptive")),
    ]
    texts = ["ddp", "ddp bucket=1M", "zero2", "zero3", "hsdp shard=2", "tp=2 dp=2", "tp=2 dp=2 zero=3", "cp=2 dp=2"]
    texts += ["pp=2 dp=2", "pp=2 dp=2 schedule=zbv", "dp=2 pp=2 order=dp", "pp=2 dp=2 zero=1"]
    strategies = [Strategy.parse(text, 4) for text in texts]
    strategies.append(Strategy(dp=2, pp=2, slowest="dp"))
    read: dict[str, set[str]] = {}
    nodes: tuple[int, ...] = ()
    ways = [(some, options[0], nodes) for some in known] + [(facts, one, nodes) for one in options[1:]]
    for strategy, (some, chosen, node_of) in product(strategies, [*ways, (facts, options[0], (0, 0, 1, 1))]):
        plan = make_plan(strategy, some, chosen, node_of)
        read.setdefault(plan.digest, set()).add(repr([node_of, seen_by_a_rank(plan)]))
    assert [texts for texts in read.values() if len(texts) > 1] == []
    assert len(read) == len({text for texts in read.values() for text in texts}) > 100


def test_a_plan_is_printed_as_a_short_table(facts: ModelFacts) -> None:
    shown = str(make_plan(Strategy(dp=2, pp=2, zero=1, microbatches=4), facts, JobOptions(recompute=True)))
    assert "dp=2 pp=2 zero=1" in shown and "groups of pp  0-2 1-3" in shown
    assert "parameters    34 of 68 on rank 0, which updates 3,600 of 13,792 elements" in shown
    first, second, third = shown.splitlines()[-3:]
    assert "stages of 2+2 blocks, 1f1b of 4 micro-batches" in first
    assert "recomputation" in second and "optimizer state sharded over 2 ranks" in third


def test_a_printed_plan_lists_only_the_parameters_that_differ(facts: ModelFacts) -> None:
    assert str(make_plan(Strategy(dp=2), facts)).splitlines() == [
        "strategy      dp=2",
        "ranks         2",
        "groups of dp  0-1",
        "parameters    68, whole on every rank",
        "steps         data: nothing sharded, 2 copies",
    ]
    shown = str(make_plan(Strategy(tp=2), facts))
    assert "blocks.*.up.weight (4): 32x16 of 64x16" in shown and "norm" not in shown


def test_a_plan_refuses_models_that_would_train_differently_with_all_reasons(facts: ModelFacts) -> None:
    apart = replace(facts, coupled=Coupled("Rows are compared", "2 of 2 differ", "one rank"), hooked="head.weight")
    with pytest.raises(StrategyError, match="hook"):
        make_plan(Strategy(dp=2), apart)
    assert [error.what[:8] for error in refusals(Strategy(dp=2), apart, JobOptions())] == ["The grad", "Rows are"]
    assert list(refusals(Strategy(), apart, JobOptions())) == []
    assert len(list(refusals(Strategy(), apart, JobOptions(cut=True)))) == 2
    bare = ModelFacts(facts.shapes)
    assert list(refusals(Strategy(pp=2), bare, JobOptions(), guessed=True)) == []
    with pytest.raises(StrategyError, match="nbkit found no blocks"):
        make_plan(Strategy(pp=2), bare)
    with pytest.raises(StrategyError, match="It is not yet known"):
        make_plan(Strategy(tp=2), replace(facts, looked=frozenset({"chain"})))


def test_updated_keeps_facts_that_are_equal(facts: ModelFacts) -> None:
    again = facts_of_a_gpt()
    assert facts.updated(again.sendable()) is facts
    more = facts.updated({**again.sendable(), "experts": "blocks.0"})
    assert more.experts == "blocks.0" and more.chain is facts.chain
