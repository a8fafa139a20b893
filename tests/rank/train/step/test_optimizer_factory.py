"""Before a strategy splits parameters: an optimizer that mixes their elements is refused, one that fails is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.train.step.optimizer_factory import Template
from nbkit.strategy import Strategy


class Mixing(torch.optim.SGD):
    """The gradient by its largest element, as optimizers that look at whole matrices do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.abs().max()


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise NameError("name 'rows' is not defined")


def factory(kind: Callable[..., torch.optim.Optimizer]) -> Template:
    model = nn.Linear(3, 2)
    return Template(kind(model.parameters(), lr=0.1), module=model)


def test_an_optimizer_that_mixes_elements_is_refused_where_parameters_are_split() -> None:
    zero3 = Strategy.parse("zero3", 2)
    factory(torch.optim.AdamW).check(zero3)
    with pytest.raises(TrainingError, match="Mixing does not update each element by itself, and dp=2 zero=3 splits"):
        factory(Mixing).check(zero3)


def test_an_optimizer_that_fails_is_not_said_to_mix_elements() -> None:
    template, before = factory(Broken), torch.get_rng_state()
    with pytest.raises(TrainingError, match="Broken failed on small tensors") as caught:
        template.check(Strategy.parse("zero3", 2))

    assert caught.value.numbers == "NameError: name 'rows' is not defined"
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_tried_whether_steps_grow_with_the_gradients() -> None:
    adaptive = torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, Mixing
    assert [factory(kind).is_adaptive() for kind in adaptive] == [True] * len(adaptive)
    assert not any(factory(kind).is_adaptive() for kind in (torch.optim.SGD, Broken))


def test_a_class_given_for_a_factory_is_told_how_to_be_one() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TrainingError, match="Adam wants its parameters") as refused:
        Template(torch.optim.Adam, module=model)  # type: ignore[arg-type]
    assert refused.value.hint == "optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)"
    with pytest.raises(TrainingError, match="Mixing wants its parameters") as refused:
        Template(Mixing, module=model)  # type: ignore[arg-type]
    assert refused.value.hint == "optimizer=lambda model: Mixing(model.parameters(), lr=1e-3)"


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    with pytest.raises(TrainingError, match="LBFGS computes the loss several times"):
        factory(torch.optim.LBFGS)
