"""Test that ZeRO 3 under autocast sends weights of matrix products in bf16 without changing a bit of the training."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate

import nbkit
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan, plan_gathers
from verify.models.odd import LENGTH, LM, VOCAB, WIDTH, Block, cross_entropy, rows

LAYERS = 4


class Twice(Block):
    """A block that applies its map twice. Autocast casts the weight once, and sums both gradients in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(torch.tanh(self.again(x))))


class Tied(LM):
    """A model with a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(LAYERS, Twice)
        self.head.weight = self.wte.weight


class Asking(LM):
    """A model that computes in the dtype of a weight."""

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).to(self.blocks[0].mlp.up.weight.dtype)


MAPS = {
    f"blocks.{i}.{part}.{kind}"
    for i in range(LAYERS)
    for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down", "again")
    for kind in ("weight", "bias")
}


def found(model: nn.Module) -> GatherPlan:
    ids = torch.randint(VOCAB, (2, LENGTH))
    return plan_gathers(model, lambda: model(ids), autocast=torch.bfloat16)


def test_only_weights_read_by_matrix_products_alone_are_cast() -> None:
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    plan = found(model)

    assert plan.casts is not None and plan.casts.dtype == torch.bfloat16
    assert plan.casts.names == MAPS  # neither the norms nor the table that the head shares
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert found(Asking()).casts is None
    assert found(LM().double()).casts is None


Case = tuple[str, bool]
"""(strategy, whether blocks are recomputed)"""


def trained(job: Any, case: Case, weights: list[Tensor]) -> dict[str, Any]:
    """Make three steps from `weights`. Return losses, weights, and the last step's bytes, measured and predicted."""
    strategy, recompute = case
    with torch.no_grad():
        for p, value in zip(job.model.parameters(), weights, strict=True):
            p.copy_(value)
    job.builder.choose(recompute=recompute)
    job.switch(strategy)
    losses, sent = [], Counter[str]()

    def listen(op: str, group: Any, num_bytes: int) -> None:
        sent[op] += num_bytes

    for batch in BATCHES:
        sent.clear()
        delegating_group.listeners.append(listen)
        losses.append(float(job.backward(batch).loss))
        delegating_group.listeners.remove(listen)
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.forget_estimates()
    terms = job.cost_model().terms(job.strategy)
    formula = sum(term.given for term in terms[0] if term.op == "all_gather") if terms else 0.0
    # A direct call has no autocast and sees the weights in their own dtype. An evaluation sees them as a step does.
    with torch.no_grad():
        losses.append(float(job.model(BATCHES[0][0]).sum()) if strategy == "zero3" else 0.0)
    with job.sharded_model.evaluating(autocast=True):
        losses.append(float(job.training_step.evaluate(job.training_step.rows(BATCHES[0]))[0]))
    job.switch("ddp")
    return {"losses": losses, "weights": [p.detach().clone() for p in job.model.parameters()], "sent": sent} | {
        "formula": formula
    }


BATCHES = [default_collate(rows(12)[at : at + 4]) for at in (0, 4, 8)]


def both_ways(world: Any, cases: list[Case]) -> dict[Case, tuple[dict[str, Any], dict[str, Any]]]:
    job = nbkit.prepare(
        Tied,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=cross_entropy,
        precision="bf16",
        hints=nbkit.ModelHints(example=BATCHES[0]),
        log_dir=None,
    )
    weights = [p.detach().clone() for p in job.model.parameters()]
    job.builder.finder.sync([job.parsed(strategy) for strategy, _ in cases])
    plan = job.builder.facts.gathers
    assert plan is not None and plan.casts is not None and plan.casts.names == MAPS
    found = {}
    for case in cases:
        job.builder.finder.set_facts(gathers=plan)
        cast = trained(job, case, weights)
        job.builder.finder.set_facts(gathers=replace(plan, casts=None))
        found[case] = cast, trained(job, case, weights)
    return found


@pytest.mark.parametrize(
    "num_ranks, cases",
    [
        (2, [("zero3", False), ("zero3", True)]),
        pytest.param(4, [("dp=2 pp=2 zero=3 microbatches=2 schedule=zb", False)], marks=pytest.mark.long),
    ],
)
def test_casts_change_no_bit_and_halve_the_gathered_bytes(
    num_ranks: int, cases: list[Case], known_to_be_right: None
) -> None:
    size = sum(p.numel() for name, p in Tied().named_parameters() if name in MAPS)
    for found in run_ranks(both_ways, num_ranks, cases):
        for case, (cast, whole) in found.items():
            assert cast["losses"] == whole["losses"], case
            assert all(torch.equal(a, b) for a, b in zip(cast["weights"], whole["weights"], strict=True)), case
            gathered = [each["sent"].pop("all_gather") for each in (cast, whole)]
            for op in ("reduce_scatter", "send"):  # gradients are summed in float32
                assert cast["sent"][op] == whole["sent"][op], case
            # Each of two ranks sends half. They gather all blocks for forward and backward, or half of the blocks once.
            passes = 2 if case[0] == "zero3" else 1 / 2
            assert gathered[1] - gathered[0] == pytest.approx(passes * 2 * size / 2, rel=0.01), case
            if case[0] == "zero3":
                assert gathered == pytest.approx([cast["formula"], whole["formula"]], rel=0.01)


def seen_alone(world: Any, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make three steps. Return the weights that this rank reads by itself, and those of the whole model."""
    job = nbkit.prepare(
        Tied,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=cross_entropy,
        precision="bf16",
        strategy=strategy,
        hints=nbkit.ModelHints(example=BATCHES[0]),
        log_dir=None,
    )
    for batch in BATCHES:
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    alone = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    return alone, job.full_state_dict()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero1_and_2_keep_float32_weights_on_every_rank(strategy: str, known_to_be_right: None) -> None:
    for alone, whole in run_ranks(seen_alone, 2, strategy):
        assert MAPS <= alone.keys()
        for name, weight in alone.items():
            assert weight.dtype == torch.float32 and torch.equal(weight, whole[name]), name
        rounded = [name for name in MAPS if torch.equal(whole[name], whole[name].bfloat16().float())]
        assert rounded == []
