"""What stands in a stage of a pipeline for a parameter that other stages hold.

It answers for shape, dtype and device, which is what models ask a weight for wherever they are
(`x.to(self.embed.weight.dtype)`). On its way to the first block that runs here the model's forward may also compute
with it: it is zeros then, and nothing of what comes of them is used. Behind that, a use of its values raises by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.proof.memory import SHAPE_ONLY
from nbkit.rank.torch_private import disabled_torch_function, pytree


class Absent(Tensor):
    """See above. param_name: of the parameter; idle: whether what is computed now is used by nobody."""

    param_name: str
    idle: Callable[[], bool]
    _is_param = True  # isinstance(..., nn.Parameter)
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: nn.Parameter, name: str, idle: Callable[[], bool]) -> Absent:
        """whole: has the shape, the dtype, the device; its values are not looked at."""
        made: Absent = Tensor._make_subclass(cls, _zeros(whole), False)
        made.param_name, made.idle = name, idle
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        if func.overloadpacket not in SHAPE_ONLY and not all(leaf.idle() for leaf in absent):
            raise _used(absent[0], str(func.overloadpacket))
        args, kwargs = pytree.tree_unflatten([_zeros(x) if isinstance(x, Absent) else x for x in leaves], spec)
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Zeros, where what is computed is not used."""
        if not self.idle():
            raise _used(self, ".data")
        return _zeros(self)

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.param_name!r}, shape {tuple(self.shape)})"


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _used(absent: Absent, how: str) -> StrategyError:
    return StrategyError(
        f"The parameter {absent.param_name!r} is used in a stage of the pipeline that does not hold it.",
        numbers=f"shape {tuple(absent.shape)}, by {how}; not so when the model was run to find its stages",
        hint="a strategy without pp; or a model that uses the same weights in every forward",
    )
