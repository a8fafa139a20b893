"""The stand-in, in a stage of a pipeline, for a parameter that other stages hold.

It has a shape, a dtype and a device, because models ask any weight for these (`x.to(self.embed.weight.dtype)`). Before
the first block that runs here, the model's forward may also compute with it. It is then zeros, and the results are not
used. After that, using its values raises an error with its name.

`model.parameters()` lists one in the place of each parameter that another stage holds (`list_absent`). So `zip` of the
parameters of two parts pairs the same ones as in one process. An operation on absent parameters alone does nothing: the
rank that holds them does it. An operation that mixes them with values of this rank raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.proof.observe import SHAPE_ONLY
from nbkit.rank.torch_private import disabled_torch_function, pytree


class Absent(Tensor):
    """A tensor that stands for a parameter of another stage.

    param_name: the name of the parameter. idle: returns True while the results of the forward are not used.
    """

    param_name: str
    idle: Callable[[], bool]
    _is_param = True  # isinstance(..., nn.Parameter)
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: Tensor, name: str, idle: Callable[[], bool]) -> Absent:
        """Make one like `whole`, which gives the shape, the dtype and the device. Its values are not read."""
        made: Absent = Tensor._make_subclass(cls, _zeros(whole), False)
        made.param_name, made.idle = name, idle
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        if func.overloadpacket in SHAPE_ONLY or all(leaf.idle() for leaf in absent):
            args, kwargs = pytree.tree_unflatten([_zeros(x) if isinstance(x, Absent) else x for x in leaves], spec)
            return func(*args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_"):
            return _each(func, args, kwargs)
        alone = all(isinstance(leaf, Absent) for leaf in leaves if isinstance(leaf, Tensor))
        if not alone or func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise _used(absent[0], str(func.overloadpacket))
        if func._schema.is_mutable:
            return absent[0]
        args, kwargs = pytree.tree_unflatten([_zeros(x) if isinstance(x, Absent) else x for x in leaves], spec)
        made = func(*args, **kwargs)
        return Absent(made, absent[0].param_name, absent[0].idle) if isinstance(made, Tensor) else made

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Zeros, where what is computed is not used; else itself."""
        return _zeros(self) if self.idle() else self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Absent):
            raise _used(self, ".data")

    def numpy(self, **_: Any) -> Any:
        """Raise: it has no values."""
        raise _used(self, "numpy")

    def tolist(self) -> Any:
        """Raise: it has no values."""
        raise _used(self, "tolist")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _used(self, "numpy")

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.param_name!r}, shape {tuple(self.shape)})"


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _used(absent: Absent, how: str) -> StrategyError:
    return StrategyError(
        f"The parameter {absent.param_name!r} is used in a stage of the pipeline that does not hold it.",
        numbers=f"shape {tuple(absent.shape)}, by {how}, under pp",
        hint="strategy='zero2', or another one without pp; or a model that uses the same weights in every forward",
    )


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a `torch._foreach_*` function on the tensors that are here. Leave the others as they are."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    here = []
    for place in zip(*lists, strict=True):
        absent = [value for value in place if isinstance(value, Absent)]
        if absent and any(isinstance(value, Tensor) and not isinstance(value, Absent) for value in place):
            raise _used(absent[0], str(func.overloadpacket))
        here.append(not absent)

    def those(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [each for each, is_here in zip(value, here, strict=True) if is_here]

    made = func(*map(those, args), **{key: those(value) for key, value in kwargs.items()}) if any(here) else None
    if func._schema.is_mutable:
        return None
    found = iter(made or ())
    return [next(found) if is_here else value for is_here, value in zip(here, lists[0], strict=True)]


def list_absent(module: nn.Module) -> None:
    """Make `parameters()` of `module` and all in it also list what other stages hold, each at its place."""
    for part in module.modules():
        if type(part).parameters is nn.Module.parameters:
            vars(part)["parameters"] = _Parameters(part)


class _Parameters:
    """Stands for the `parameters` method of a module.

    It refers to what the module holds, not to the module, which would be a reference cycle.
    """

    def __init__(self, part: nn.Module) -> None:
        self._own, self._parts = part._parameters, part._modules
        self._absent = {name: value for name, value in vars(part).items() if isinstance(value, Absent)}

    def __call__(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        seen = set[int]()
        held = [(self._own, self._absent)]
        for child in self._parts.values() if recurse else ():
            held += [] if child is None else [(each._parameters, vars(each)) for each in child.modules()]
        for params, attributes in held:
            for name, param in params.items():
                found: Any = attributes.get(name) if param is None else param
                if found is None or id(found) in seen or (param is None and not isinstance(found, Absent)):
                    continue
                seen.add(id(found))
                if param is not None or not sys._getframe(1).f_code.co_filename.startswith(_INSIDE):
                    yield found


_INSIDE = str(Path(__file__).parents[3]), str(Path(nn.__file__).parent)
"""Folders whose code sees only the parameters that this rank holds: nbkit, and torch.nn with its utilities."""
