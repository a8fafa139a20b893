"""The optimizer as its user holds it: a stable handle, so that what is behind it can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbkit.rank.telemetry.phases import phase


class OptimizerHandle(torch.optim.Optimizer):
    """Delegates to the optimizer behind it. An Optimizer by type, so that torch's LR schedulers take it.

    update: makes the step. forgotten: hears that the gradients are gone, and whether they are None.
    """

    inner: torch.optim.Optimizer

    # Optimizer.__init__ would build groups and hooks of its own; everything lives in `inner`.
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        update: Callable[[], None],
        forgotten: Callable[[bool], None],
    ) -> None:
        self.__dict__.update(inner=inner, _update=update, _forgotten=forgotten)

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
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)
