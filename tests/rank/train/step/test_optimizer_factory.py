"""Test that an optimizer's needs are found by trials before a strategy splits parameters, and failures are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import Recording
from optimizers import OPTIMIZERS, muon_and_adamw
from ranks import known_optimizers, run_ranks
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.strategy import Strategy


class Mixing(torch.optim.SGD):
    """SGD that divides by the gradient's largest element, so elements mix, as in optimizers of whole matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.abs().max()


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise NameError("name 'rows' is not defined")


def factory(kind: Callable[..., torch.optim.Optimizer]) -> OptimizerSpec:
    model = nn.Linear(3, 2)
    return OptimizerSpec(kind(model.parameters(), lr=0.1), module=model)


def test_optimizers_of_whole_tensors_get_owners_and_of_all_parameters_refused() -> None:
    zero3, tp, model = Strategy.parse("zero3", 2), Strategy.parse("tp=2", 2), nn.Linear(3, 2)
    assert factory(torch.optim.AdamW).whole("rows") == frozenset()
    for strategy in (zero3, tp):
        (mixing := factory(Mixing)).check(strategy)
        mixing.check_moves(Strategy.parse("ddp", 2), strategy)
        mixing.check_saves(strategy)
        assert mixing.whole("rows") == mixing.whole("columns") == {"weight", "bias"}
    by_row = OptimizerSpec(OPTIMIZERS["centralised"], module=model)
    by_row.check(zero3)
    assert by_row.whole("rows") == frozenset() and by_row.whole("columns") == {"weight"}
    said = "Clipping does not update each element by itself, and dp=2 zero=3 splits the update"
    with pytest.raises(TrainingError, match=said):
        OptimizerSpec(OPTIMIZERS["clipping"], module=model).check(zero3)


def test_optimizers_that_tests_do_not_analyse_work_under_every_strategy() -> None:
    optim = torch.optim
    made: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        "Adam": lambda model: optim.Adam(model.parameters(), amsgrad=True),
        "AdamW": lambda model: optim.AdamW(model.parameters()),
        "Recording": Recording,
    }
    assert made.keys() == set(known_optimizers)
    strategies = [Strategy.parse(text, 2) for text in ("ddp", "zero1", "zero3", "dp=1 tp=2", "pp")]
    for name, kind in made.items():
        template = OptimizerSpec(kind, module=nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)))
        assert template.name == name
        for strategy in strategies[1:]:
            template.check_moves(strategies[0], strategy)
            template.check_saves(strategy)


def test_an_optimizer_that_fails_in_its_trial_is_reported_as_failing() -> None:
    template, before = factory(Broken), torch.get_rng_state()
    with pytest.raises(TrainingError, match="nbkit tries Broken on small tensors") as caught:
        template.check(Strategy.parse("zero3", 2))

    assert caught.value.numbers == "NameError: name 'rows' is not defined"
    assert torch.equal(torch.get_rng_state(), before)


def test_adaptive_optimizers_are_found_by_a_trial() -> None:
    adaptive = torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, Mixing
    assert [factory(kind).is_adaptive() for kind in adaptive] == [True] * len(adaptive)
    assert not any(factory(kind).is_adaptive() for kind in (torch.optim.SGD, Broken))


def test_an_optimizer_that_ignores_the_rate_of_its_groups_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for name in ("chained", "lookahead", "prodigy", "adafactor"):
        OptimizerSpec(OPTIMIZERS[name], module=model).check_rate()
    with pytest.raises(TrainingError, match="Both ignores the learning rate of its groups"):
        OptimizerSpec(OPTIMIZERS["two in one"], module=model).check_rate()


def sends(world: Any) -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # an import at the top would cost each worker a second

    model = nn.Linear(3, 2)
    with pytest.raises(TrainingError) as refused:
        kind = torch.optim.AdamW
        OptimizerSpec(lambda m: ZeroRedundancyOptimizer(m.parameters(), optimizer_class=kind, lr=0.01), module=model)
    return [refused.value.what, refused.value.hint or ""]


def test_an_optimizer_that_sends_messages_is_refused() -> None:
    for what, hint in run_ranks(sends, 2):
        assert what.startswith("ZeroRedundancyOptimizer sends messages to other ranks in its step")
        assert hint.endswith("strategy='zero1'")


def test_an_optimizer_that_keeps_state_outside_of_itself_is_refused() -> None:
    with pytest.raises(TrainingError, match="Counting keeps state outside of itself"):
        OptimizerSpec(OPTIMIZERS["closure"], module=nn.Linear(3, 2))


def test_a_trial_changes_neither_weights_nor_the_optimizers_state() -> None:
    model = nn.Linear(3, 2)
    before, draws = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    template = OptimizerSpec(OPTIMIZERS["list"], module=model)
    with pytest.raises(TrainingError):
        template.check(Strategy.parse("zero3", 2))
    optimizer = template.build(dict(model.named_parameters()))

    assert torch.equal(torch.get_rng_state(), draws)
    for p, slow, was in zip(model.parameters(), optimizer.slow, before, strict=True):
        assert torch.equal(p, was) and torch.equal(slow, was)
    assert all(own is p for own, p in zip(optimizer.own, model.parameters(), strict=True))


def test_an_optimizer_class_instead_of_a_factory_gets_a_hint() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TrainingError, match="Adam needs its parameters") as refused:
        OptimizerSpec(torch.optim.Adam, module=model)  # type: ignore[arg-type]
    assert refused.value.hint == "optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)"
    with pytest.raises(TrainingError, match="Mixing needs its parameters") as refused:
        OptimizerSpec(Mixing, module=model)  # type: ignore[arg-type]
    assert refused.value.hint == "optimizer=lambda model: Mixing(model.parameters(), lr=1e-3)"


class InGroups(torch.optim.SGD):
    """SGD that divides by the norm of the gradients of each group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p -= group["lr"] * p.grad / norm


def by_group(model: nn.Module) -> torch.optim.Optimizer:
    return InGroups([{"params": list(part.parameters())} for part in model], lr=0.1)  # type: ignore[union-attr]


NEEDS: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "adamw": (lambda model: torch.optim.AdamW(model.parameters()), "ELEMENT", "ELEMENT"),
    "muon and adamw": (muon_and_adamw, "TENSOR", "ELEMENT"),
    "in groups": (by_group, "GROUP", "GROUP"),
    **{
        name: (OPTIMIZERS[name], matrices, vectors)
        for name, matrices, vectors in (
            ("lion", "ELEMENT", "ELEMENT"),
            ("ademamix", "ELEMENT", "ELEMENT"),
            ("agc", "ROW", "TENSOR"),
            ("muon", "TENSOR", "ELEMENT"),
            ("soap", "TENSOR", "ELEMENT"),
            ("lamb", "TENSOR", "TENSOR"),
            ("adafactor", "TENSOR", "TENSOR"),
            ("8-bit", "TENSOR", "TENSOR"),
            ("prodigy", "ALL", "ALL"),
            ("d-adaptation", "ALL", "ALL"),
            ("clipping", "ALL", "ALL"),
        )
    },
}


@pytest.mark.long
def test_the_needs_of_an_optimizer_are_found_by_running_it() -> None:
    for name, (kind, matrices, vectors) in NEEDS.items():
        model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 10), nn.Linear(10, 9), nn.Linear(9, 5))
        needs = OptimizerSpec(kind, module=model).needs()
        assert {need.name for part, need in needs.items() if part.endswith("weight")} == {matrices}, name
        assert {need.name for part, need in needs.items() if part.endswith("bias")} == {vectors}, name
        assert len(needs) == 8


def test_a_refusal_has_the_bytes_of_all_gradients_on_one_rank() -> None:
    model, tp = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 10)), Strategy.parse("tp=2", 2)
    for kind, what, state in (
        (OPTIMIZERS["clipping"], "all parameters", "4.04"),
        (by_group, "all tensors of a group", "0"),
    ):
        with pytest.raises(TrainingError, match="does not update each element") as refused:
            OptimizerSpec(kind, module=model).check(tp)
        said = f"; it needs {what} together: if one rank updated them, it would get 2.02 MB of gradients in each step, "
        said += f"keep {state} MB of state, and send 2.02 MB of weights, while the others wait"
        assert (refused.value.numbers or "").endswith(said)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TrainingError, match="LBFGS needs a closure"):
        factory(torch.optim.LBFGS)
