"""The optimizer as its user holds it: a stable handle, so that what is behind it can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.rank.telemetry.phases import phase


class OptimizerHandle(torch.optim.Optimizer):
    """Delegates to the optimizer behind it. An Optimizer by type, so that torch's LR schedulers take it.

    update: makes the step. forgotten: hears that the gradients are gone, and whether they are None. fits: whether a
    tensor of this shape can be what the optimizer remembers, by this key, of a parameter.
    """

    inner: torch.optim.Optimizer

    # Optimizer.__init__ would build groups and hooks of its own; everything lives in `inner`.
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        update: Callable[[], None],
        forgotten: Callable[[bool], None],
        fits: Callable[[torch.nn.Parameter, str, tuple[int, ...]], bool],
    ) -> None:
        self.__dict__.update(inner=inner, _update=update, _forgotten=forgotten, _fits=fits)

    def step(self, closure: Any = None) -> Any:
        """One update of the parameters. A closure is not supported: `job.backward` makes the gradients."""
        if closure is not None:
            raise TypeError("job.optimizer.step takes no closure: job.backward(batch) makes the gradients")
        with phase("optimizer"):
            self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        with phase("optimizer"):
            self.inner.zero_grad(set_to_none=set_to_none)
            self._forgotten(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this rank gave, under a strategy that holds the same parts.

        Raises TrainingError, before anything is changed, for a state of other tensors: of whole parameters, where this
        rank holds parts of them.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [p for group in self.inner.param_groups for p in group["params"]]
        if len(saved) != len(held):
            raise _misfit(f"it is of {len(saved)} parameters, and this rank updates {len(held)}")
        for number, p in zip(saved, held, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
                if shape and not self._fits(p, key, shape):
                    raise _misfit(f"{key} of parameter {number} is {shape}, and this rank updates {tuple(p.shape)}")
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)


def _misfit(numbers: str) -> TrainingError:
    return TrainingError(
        "This state is not of what the optimizer updates here. A strategy that splits gives each rank a part.",
        numbers=numbers,
        hint="trainer.load(path) of what trainer.save(path) wrote: it goes under any strategy",
    )
