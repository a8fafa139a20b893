"""Test that a call with unknown arguments raises an error that lists the known ones and a line to type."""

from typing import Any

import pytest
import torch
from torch import nn

import nbkit
from nbkit.errors import UsageError
from nbkit.unfit_calls import says_what_it_takes


@says_what_it_takes(hint="halved(8)")
def halved(number: float, *, batch_size: int = 2, clip_norm: float = 1.0) -> float:
    return number / batch_size


def unfit(call: Any, *given: Any, **named: Any) -> UsageError:
    with pytest.raises(UsageError) as refused:
        call(*given, **named)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__ is False
    return refused.value


def test_a_valid_call_runs_the_function_itself() -> None:
    assert halved(8) == 4 and halved(number=8, batch_size=4) == 2


def test_an_unknown_argument_raises_an_error_that_lists_all_arguments() -> None:
    error = unfit(halved, 8, device="cpu")

    assert error.what == "halved() got an unexpected keyword argument 'device'."
    assert (error.numbers, error.hint) == ("it takes number=, batch_size=, clip_norm=", "halved(8)")


@pytest.mark.parametrize(
    ("typed", "meant"), [("batchsize", "batch_size"), ("clip_grad", "clip_norm"), ("number_of_rows", "number")]
)
def test_a_misspelled_argument_gets_a_hint_with_the_right_name(typed: str, meant: str) -> None:
    assert unfit(halved, 8, **{typed: 1}).hint == f"{meant}=..."


def test_a_missing_argument_gets_a_hint_with_a_valid_call() -> None:
    error = unfit(halved)

    assert "missing 1 required positional argument: 'number'" in error.what and error.hint == "halved(8)"


def test_an_error_inside_the_function_is_raised_unchanged() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        halved("8")  # type: ignore[arg-type]


def test_constructors_and_planner_give_hints_for_wrong_arguments() -> None:
    data = [(torch.zeros(2), torch.zeros(2))] * 8

    trainer = unfit(nbkit.Trainer, model=nn.Linear(2, 2), dataset=data)
    assert trainer.what == "Trainer() got an unexpected keyword argument 'dataset'." and trainer.hint == "data=..."
    assert unfit(nbkit.Trainer, epochs=2).hint.endswith("then trainer.fit(500)")
    assert "model=, loss=, optimizer=, data=, batch_size=" in unfit(nbkit.Trainer, epochs=2).numbers
    assert "missing 1 required positional argument: 'data'" in unfit(nbkit.Balanced).what
    assert unfit(nbkit.Balanced, data, costs=len).hint == "cost=..."
    config = nbkit.GPTConfig(width=64, layers=2, heads=2)
    assert unfit(nbkit.plan, config, batch_size=8, on="8 H100").hint == "batch=..."
    assert unfit(nbkit.plan, config, batch=8).hint.startswith("nbkit.plan(nbkit.GPTConfig(")
