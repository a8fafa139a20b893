"""Test ZeRO 3 with models that use a weight outside of its block, or do not call each block exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.parallel.zero3.gather_plan import plan_gathers
from nbkit.rank.train.trainer import Trainer
from verify.models.odd import (
    LM,
    WIDTH,
    Again,
    Albert,
    Giver,
    Itself,
    Method,
    NanoGPT,
    Pairs,
    Plain,
    Recurrent,
    a_part_too,
    borrowed,
    built,
    cross_entropy,
    doing,
    frozen_inside,
    given_weights,
    gradient_inside,
    hooked,
    in_one_segment,
    in_place,
    listed,
    logged,
    normed,
    one_mlp_for_all,
    order,
    other_method,
    parts_alone,
    penalised,
    penalty,
    penalty_before,
    penalty_between,
    penalty_of_all,
    renormed,
    rows,
    shapes,
    two_towers,
    verdict,
    without_gradient_first,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "a penalty on the weights of blocks": doing(penalty),
    "a penalty before the blocks": doing(penalty_before),
    "a penalty between the blocks": doing(penalty_between),
    "a penalty on all weights": doing(penalty_of_all),
    "the norm of a weight": doing(logged),
    "a block's weight in another layer": doing(borrowed),
    "shape and dtype of a weight": doing(shapes),
    "parts of blocks, called by themselves": doing(parts_alone),
    "a part of a block too": doing(a_part_too),
    "another method of a block": doing(other_method, block=Method),
    "weights that blocks return": doing(given_weights, block=Giver),
    "a block frozen and thawed in forward": doing(frozen_inside),
    "a hook that uses a weight": hooked,
    "one MLP in all blocks": one_mlp_for_all,
    "weights in a list": listed("list"),
    "weights in a dict": listed("dict"),
    "weights in an object": listed("object"),
    "nanoGPT": NanoGPT,
    "a tied LSTM": Recurrent,
    "one block three times": Albert,
    "lists in a list": Pairs,
    "all blocks twice": order(0, 1, 2, 0, 1, 2),
    "some blocks twice": order(0, 1, 2, 0, 2),
    "backwards": order(2, 1, 0),
    "a block that calls itself": lambda: LM(block=Again),
    "a model that calls itself": Itself,
    "first without gradients": doing(without_gradient_first),
    "towers in another order": doing(two_towers),
    "recomputed in one segment": doing(in_one_segment),
    "a gradient in forward": doing(gradient_inside, block=Plain),
    "weight_norm": normed(nn.utils.parametrizations.weight_norm),
    "spectral_norm": normed(nn.utils.parametrizations.spectral_norm),
    "weight_norm by a hook": normed(nn.utils.weight_norm),
}
CHANGED = {"clamped in forward": doing(in_place), "an embedding with max_norm": renormed}
SWITCHED = ("nanoGPT", "a tied LSTM", "a penalty on the weights of blocks", "weights in a list")
# One for each way to gather: with the whole model, around several blocks, twice, ahead, by name, by a parametrization.
SAMPLE = ("a penalty on the weights of blocks", "a block's weight in another layer", "weights in a list",
          "some blocks twice", "recomputed in one segment", "a gradient in forward", "weight_norm")  # fmt: skip
REST = tuple(name for name in MODELS if name not in SAMPLE)


def table(world: Any, names: tuple[str, ...], switched: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    found = {name: verdict(MODELS[name], "zero3") for name in names}
    found["a penalty in the loss"] = verdict(LM, "zero3", loss_of=penalised)
    for name in switched:
        found[f"{name}, switched"] = verdict(MODELS[name], "zero3", first="ddp")
    return found | {name: verdict(make, "zero3") for name, make in CHANGED.items()}


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("names", "switched"), [(SAMPLE, SWITCHED[:1]), pytest.param(REST, SWITCHED[1:], marks=pytest.mark.long)]
)
def test_a_weight_used_outside_of_its_block_trains_as_in_one_process(
    names: tuple[str, ...], switched: tuple[str, ...]
) -> None:
    for found in run_ranks(table, 2, names, switched, timeout=170):
        changed = {name: found.pop(name) for name in CHANGED}
        assert {name: what for name, what in found.items() if what[0] != "equal"} == {}
        for kind, text in changed.values():
            assert kind == "refused" and "in place" in text and "weight'" in text


UNSEEN = {
    "nanoGPT": "equal",
    "a tied LSTM": "equal",
    "one block three times": "equal",
    "shape and dtype of a weight": "equal",
    "weight_norm": "equal",
    "a penalty on the weights of blocks": "mlp.up.weight' is used outside of the forward of",
    "the norm of a weight": "qkv.weight' is used outside of the forward of",
    "weights in a list": "mlp.up.weight' is used outside of the forward of",
    "weights that blocks return": "weight' is used outside of the forward of",
    "a gradient in forward": "is used outside of the forward of",
    "a block frozen and thawed in forward": "requires_grad is set to False",
    "all blocks twice": "'blocks.0' is called again in a forward",
    "first without gradients": "'blocks.0' is called again in a forward",
    "backwards": "'blocks.2' is needed in backward later than its place",
    "recomputed in one segment": "'blocks.0' is needed in backward before the backward pass of 'blocks.2' is done",
    "an embedding with max_norm": "changes the parameter 'wte.weight' in place",
}


# Some models that train equally, and one for each reason of a refusal.
WATCHED = ("nanoGPT", "one block three times", "a penalty on the weights of blocks", "weights that blocks return",
           "a block frozen and thawed in forward", "all blocks twice", "backwards", "recomputed in one segment",
           "an embedding with max_norm")  # fmt: skip


def unseen(world: Any, names: list[str]) -> dict[str, tuple[str, str]]:
    return {name: verdict((MODELS | CHANGED)[name], "zero3", seen=False) for name in names}


@pytest.mark.long
@pytest.mark.parametrize("names", [WATCHED, [name for name in UNSEEN if name not in WATCHED]])
def test_without_an_example_a_model_trains_right_or_is_refused_in_time(names: list[str]) -> None:
    """Watch the first step, because the model was not run before."""
    for found in run_ranks(unseen, 2, names, timeout=170):
        for name, (kind, text) in found.items():
            expected = UNSEEN[name]
            assert kind == ("equal" if expected == "equal" else "refused"), (name, text)
            assert expected == "equal" or expected in text, (name, text)
            hint = "between two steps" if "max_norm" in name else "strategy='zero2'"
            assert kind == "equal" or hint in text or "strategy='ddp'" in text, (name, text)
            assert "max_norm" not in name or "ddp" not in text, (name, text)


def other_strategies(world: Any) -> dict[str, tuple[str, str]]:
    cases = (("weights in a list", "zero1"), ("weights in a dict", "zero2"), ("weight_norm by a hook", "zero1"))
    return {f"{name}, {zero}": verdict(MODELS[name], zero, first="ddp") for name, zero in cases}


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_weights_in_a_list_are_tracked_by_every_strategy() -> None:
    for found in run_ranks(other_strategies, 2, timeout=120):
        assert {name: what for name, what in found.items() if what[0] != "equal"} == {}


def later(world: Any) -> list[Any]:
    """Train a model that begins to use a weight after some steps, and read the module's weights meanwhile."""
    watch: dict[str, bool] = {}

    def how(model: Any, x: torch.Tensor) -> torch.Tensor:
        return penalty(model, x) if watch.get("on") else model.through(x, range(3))

    model = built(doing(how))
    job = Trainer(
        model=model,
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=rows(8),
        batch_size=4,
        log_dir=None,
        progress=False,
        strategy="zero3",
    )
    own = {id(p) for p in job.model.parameters()}
    job.fit(1)
    watch["on"] = True
    said = []
    for run in (lambda: job.fit(1), lambda: job.evaluate(rows(4))):
        try:
            run()
        except TrainingError as error:
            said.append(str(error))
        assert {id(p) for p in job.model.parameters()} == own
    with torch.no_grad():
        sizes = sum(float(p.norm()) > 0 for p in job.model.parameters())
    watch["on"] = False
    ids = rows(1)[0][0][None]
    by_hand = job.model(ids)
    assert by_hand.requires_grad and {id(p) for p in job.model.parameters()} == own
    with torch.no_grad():
        alone = job.model.blocks[1](torch.randn(1, LENGTH_OF_ONE, WIDTH).double()).shape
    job.fit(1)
    return [said, sizes > 0, tuple(alone), job.step]


LENGTH_OF_ONE = 5


def test_a_later_use_of_a_weight_is_refused_by_name_and_the_job_goes_on() -> None:
    for said, sizes, alone, step in run_ranks(later, 2):
        assert len(said) == 2 and sizes and alone == (1, LENGTH_OF_ONE, WIDTH) and step == 2
        for text in said:
            assert "The parameter 'blocks." in text and "mlp.up.weight' is used outside of the forward of" in text


def plan_of(make: Callable[[], nn.Module]) -> Any:
    model = built(make)
    ids = torch.stack([row[0] for row in rows(2)])
    flags = [p.requires_grad for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    plan = plan_gathers(model, lambda: model(ids))
    assert model.training and [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, value) and p.grad is None for p, value in zip(model.parameters(), values, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    return plan


@pytest.mark.long
def test_the_plan_gathers_block_by_block_where_possible() -> None:
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    assert plan_of(LM).units == blocks and not plan_of(LM).rooted and not plan_of(LM).notes
    assert plan_of(NanoGPT).units == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    assert plan_of(order(2, 1, 0)).units == blocks[::-1]
    assert plan_of(order(0, 1, 2, 0)).units == ("blocks.1", "blocks.2")
    assert plan_of(doing(penalty)).units == blocks
    assert plan_of(doing(penalty)).rooted == {f"{block}.mlp.up.weight" for block in blocks}
    assert plan_of(doing(penalty_of_all)).units == ()
    # Blocks recomputed in one segment are gathered ahead.
    assert plan_of(doing(in_one_segment)).units == blocks and plan_of(doing(in_one_segment)).ahead == 2
    assert plan_of(doing(in_place)).refused is not None
    assert "called 3 times" in " ".join(plan_of(Albert).notes)


def test_a_plan_refused_on_few_positions_is_made_on_all() -> None:
    def scaled_where_short(model: Any, x: torch.Tensor) -> torch.Tensor:
        return in_place(model, x) if x.shape[1] < 5 else model.through(x, range(3))

    model, ids = built(doing(scaled_where_short)), torch.stack([row[0] for row in rows(2)])
    assert ids.shape[1] >= 5
    refused = plan_gathers(model, lambda: model(ids[:, :4]))
    assert refused.refused is not None and "in place" in str(refused.refused)
    for brief in (lambda: model(ids[:, :4]), lambda: model(ids[:, :0])):
        plan = plan_gathers(model, lambda: model(ids), brief=brief)
        assert plan.refused is None and plan.units == ("blocks.0", "blocks.1", "blocks.2")


def test_check_gives_the_same_results_without_ranks() -> None:
    batch = tuple(torch.stack(part) for part in zip(*rows(4), strict=True))
    fits = nbkit.check(built(doing(penalty)), "zero3", batch, 2)
    assert fits.ok and "used outside of blocks.0" in str(fits)
    assert nbkit.check(built(NanoGPT), "zero3", batch, 2).ok
    refused = nbkit.check(built(renormed), "zero3", batch, 2)
    assert not refused.ok and "'wte.weight' in place" in str(refused)
    # Each replica would scale down only the rows that it looked up itself.
    alike = nbkit.check(built(renormed), "ddp", batch, 2)
    assert not alike.ok and "changes the parameter 'wte.weight' in place" in str(alike)
