"""The placeholder in a module for a parameter of ZeRO 3 whose values are not on this rank.

It tells shape, dtype and device of the whole parameter, which is what models ask a weight for. Any use of its values
raises by name: a part of a weight in place of the whole gives wrong numbers, often without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.meta_module import marked
from nbkit.rank.parallel.proof.memory import SHAPE_ONLY
from nbkit.rank.torch_private import disabled_torch_function, tree_leaves

_HINT = (
    "strategy='zero2', which keeps weights whole; or a batch to see it with beforehand: example=batch of "
    "nbkit.prepare, data that can be indexed of a Trainer"
)


def used_outside(name: str, unit: str, how: str) -> TrainingError:
    """The error for a parameter that is used while the block that holds it does not run."""
    return TrainingError(
        f"The parameter {name!r} is used outside of the forward of {unit!r}, where zero=3 has only a part of it.",
        numbers=how,
        hint=_HINT,
    )


class NotGathered(Tensor):
    """See above. param_name, unit_name: of the parameter, and of the block with which it is gathered."""

    param_name: str
    unit_name: str
    _is_param = True  # isinstance(..., nn.Parameter)
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: nn.Parameter, name: str, unit: str) -> NotGathered:
        """whole: has the shape, the dtype, the device; its values are not looked at."""
        blank = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
        made: NotGathered = Tensor._make_subclass(cls, blank, whole.requires_grad)
        marked(made, whole).param_name, made.unit_name = name, unit
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in SHAPE_ONLY:
            blank = torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(blank, *args[1:], **(kwargs or {}))
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, NotGathered))
        raise used_outside(first.param_name, first.unit_name, f"shape {tuple(first.shape)}, by {func.overloadpacket}")

    # These reach no operator.

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained in this step."""
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise used_outside(self.param_name, self.unit_name, f"requires_grad is set to {value} within a step")

    def follow(self, trained: bool) -> None:
        """A step begins, in which the parameter is trained or not."""
        Tensor.requires_grad_(self, trained)

    def requires_grad_(self, requires_grad: bool = True) -> NotGathered:
        """Raises TrainingError for another value than it has."""
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Raises TrainingError."""
        raise used_outside(self.param_name, self.unit_name, ".data")

    @data.setter
    def data(self, value: Tensor) -> None:
        raise used_outside(self.param_name, self.unit_name, ".data is set")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NotGathered({self.param_name!r}, shape {tuple(self.shape)}, with {self.unit_name!r})"
