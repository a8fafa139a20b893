"""Run a user's `forward_step`, a function of forward and loss, even if no rank can run the whole model.

    def forward_step(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    job = nbkit.prepare(model, optimizer, forward_step=forward_step, strategy="pp=2")
    for batch in job.batches(loader):
        job.backward(batch)

In a pipeline the first stage needs the arguments of the model, and the last stage has its output. So the function runs
twice. The first run ends at the call of the model, and gives the arguments. In the second run the call returns the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.torch_private import tree_leaves

ForwardStep = Callable[[Any, Any], Any]
"""(model, batch) -> a mean over the rows, or (sum, weight). batch: the rows of a micro-batch."""

_EXAMPLE = "def forward_step(model, batch): x, y = batch; return F.cross_entropy(model(x), y)"


class _Called(BaseException):
    """Leaves the function at the call of the model. `except Exception` in the user's code does not catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_given, self.kwargs = args, kwargs


def in_two(forward_step: ForwardStep) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Return two functions: (batch -> the input of the model, (output, batch) -> the loss).

    Both raise TrainingError if `forward_step` does not call the model exactly once, or if it draws random numbers:
    every rank and micro-batch would draw the same numbers.
    """

    def arguments(batch: Any) -> Any:
        def model(*args: Any, **kwargs: Any) -> Any:
            raise _Called(args, kwargs)

        before = _generators(batch)
        try:
            forward_step(model, batch)
        except _Called as called:
            _refuse_draws(before, batch)
            if called.args_given and called.kwargs:
                raise TrainingError(
                    "forward_step gives the model some arguments by position and some by name.",
                    numbers=f"{len(called.args_given)} by position; by name: {', '.join(called.kwargs)}",
                    hint="give the model all of them by name",
                ) from None
            return called.kwargs or (called.args_given[0] if len(called.args_given) == 1 else called.args_given)
        raise TrainingError("forward_step returned without a call of the model.", numbers="0 calls", hint=_EXAMPLE)

    def loss(output: Any, batch: Any) -> Any:
        calls = 0

        def model(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise TrainingError(
                    "forward_step calls the model a second time, and a pipeline runs it once for each micro-batch.",
                    numbers=f"{calls} calls",
                    hint="one call with all rows: model(torch.cat([x, y])); or job.rows and job.backward(loss), "
                    "without pp",
                )
            return output

        before = _generators(batch)
        found = forward_step(model, batch)
        _refuse_draws(before, batch)
        return found

    return arguments, loss


def _generators(batch: Any) -> list[Tensor]:
    """Return the states of torch's generators, of the CPU and of the device that holds the batch."""
    held = (leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return accelerator().generator_states(next(held, torch.device("cpu")))


def _refuse_draws(before: Sequence[Tensor], batch: Any) -> None:
    if all(torch.equal(old, new) for old, new in zip(before, _generators(batch), strict=True)):
        return
    raise TrainingError(
        "forward_step draws random numbers, and each rank and micro-batch would draw the same ones.",
        numbers="torch's generator has moved",
        hint="draw for the whole batch in the loop: job.backward([x, torch.randn_like(x)])",
    )
