"""Test that a user's call of a split model, which all ranks must make, is distinguished from the call of a step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import nbkit
from nbkit.rank.parallel.module.forward_wrapper import mark_parts
from nbkit.rank.world.activity import split_model_call

Found = tuple[FrameType, str] | None


class Block(nn.Module):
    """A block whose forward notes the user's call, at the place where a gather of its weights would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Found] = []

    def forward(self, x: Any) -> Any:
        frames, frame = [], sys._getframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back  # type: ignore[assignment]
        self.found.append(split_model_call(frames))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        return self.block(x)


@pytest.fixture
def model() -> Model:
    model = Model()
    mark_parts(model, "dp=2 zero=3")
    return model


def step(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `call` from a file of nbkit."""
    names: dict[str, Any] = {"call": call}
    file = str(Path(nbkit.__file__).parent / "rank" / "train" / "step" / "step.py")
    exec(compile("def made(x):\n    return call(x)\n", file, "exec"), names)
    made: Callable[[Any], Any] = names["made"]
    return made


def test_the_line_that_calls_the_whole_model_is_found(model: Model) -> None:
    here = inspect.currentframe()

    model(torch.ones(1))

    (found,) = model.block.found
    assert found is not None and found[0] is here and found[1] == "dp=2 zero=3"


def test_a_call_in_a_callback_is_the_users_and_one_in_a_step_is_not(model: Model) -> None:
    def callback(x: Any) -> Any:
        return model(x)

    step(model)(torch.ones(1))
    step(callback)(torch.ones(1))

    in_step, in_callback = model.block.found
    assert in_step is None and in_callback is not None and in_callback[0].f_code is callback.__code__


def test_calls_of_a_model_that_is_not_split_are_not_reported() -> None:
    model = Model()

    model(torch.ones(1))

    assert model.block.found == [None]
