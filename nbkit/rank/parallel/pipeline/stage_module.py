"""A rank's stages of a pipeline: the user's model with only some of its parameters, run piece by piece.

A parameter that a rank does not hold is None in its module, as in torch for a missing bias. So the module lists exactly
this rank's parameters under their original names. Where the model reads another parameter, it gets an `Absent`. A tied
weight stays tied, and is on every rank that uses it. Its gradient is the sum over these ranks. Other modules of nbkit
compute this sum and send everything else.

An `Absent` has a shape, a dtype and a device, because models often read them, as in `x.to(self.embed.weight.dtype)`.
Before the first block that runs here, the model's forward may also compute with it. Then its values are zeros, and the
results are not used. After that, any use of its values raises an error with its name.

`model.parameters()` lists an `Absent` for each parameter of another stage (`list_absent`). So `zip` over the parameters
of two modules pairs the same parameters as in one process. An operation on absent parameters alone does nothing,
because it runs on the rank that holds them. An operation that mixes them with values of this rank raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.module.copies import homes, put_aliases, replace_submodule
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.pipeline.partial_forward import StageBoundaries
from nbkit.rank.parallel.proof.observe import SHAPE_ONLY
from nbkit.rank.torch_private import disabled_torch_function, pytree


class Absent(Tensor):
    """A tensor that replaces a parameter of another stage.

    param_name: the name of the parameter. idle: returns True while the results of the forward are not used.
    """

    param_name: str
    idle: Callable[[], bool]
    _is_param = True  # isinstance(..., nn.Parameter)
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: Tensor, name: str, idle: Callable[[], bool]) -> Absent:
        """Make one with the shape, dtype and device of `whole`, whose values are not read."""
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
        """Return zeros while results are not used, else the tensor itself."""
        return _zeros(self) if self.idle() else self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Absent):
            raise _used(self, ".data")

    def numpy(self, **_: Any) -> Any:
        """Raise StrategyError, because it has no values."""
        raise _used(self, "numpy")

    def tolist(self) -> Any:
        """Raise StrategyError, because it has no values."""
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
        f"A stage of the pipeline uses the parameter {absent.param_name!r}, but does not hold it.",
        numbers=f"shape {tuple(absent.shape)}, by {how}, under pp",
        hint="strategy='zero2', or another one without pp; or a model that uses the same weights in every forward",
    )


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a `torch._foreach_*` function on the tensors of this rank. Leave the others unchanged."""
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
    """Make `parameters()` of `module` and its submodules also list the parameters of other stages, in their places."""
    for part in module.modules():
        if type(part).parameters is nn.Module.parameters:
            vars(part)["parameters"] = _Parameters(part)


class _Parameters:
    """Replaces the `parameters` method of a module.

    It refers to the module's dicts, not to the module, to avoid a reference cycle.
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


class Staged:
    """The parts of `chain` that one rank runs. `module` is changed in place.

    ranges: (lo, hi) per stage of this rank: pieces lo to hi - 1 of the chain. Several stages share the module, and the
    parameters that several of them use. The single range (0, len(chain)) leaves the module unchanged. holds: names of
    the remaining parameters, by their first names in the whole model. team: the ranks along tp, each of which sends
    only its positions to the next stage (sequence_parallel.py). StageBoundaries are installed here, before other
    strategies change the module, so that these changes run only if the module does.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: LayerChain,
        ranges: Sequence[tuple[int, int]],
        *,
        team: dist.ProcessGroup | None = None,
    ) -> None:
        self.module, self.chain, self.ranges = module, chain, tuple(ranges)
        self._gates: StageBoundaries | None = None
        if self.ranges == ((0, len(chain)),):
            self.holds = set(homes(module))
            return
        _without_cache(module)
        self._gates = StageBoundaries(module, chain.blocks, chain.entries, chain.skipped, again=chain.recomputes)
        self._gates.team = team
        self.holds = set().union(*(chain.holds(lo, hi) for lo, hi in self.ranges))
        _drop(module, self.holds, self._gates.idle)
        list_absent(module)

    def runs(self, name: str) -> bool:
        """Return True if the module with the parameter or buffer `name` runs on this rank."""
        piece = self.chain.piece_of(name)
        return any(lo <= piece < hi for lo, hi in self.ranges)

    def forward(self, index: int, value: Any, received: Sequence[Tensor]) -> Any:
        """Run stage `index` of this rank.

        value: the input of the whole model (tensor, tuple or dict), which every stage gets. received: the result of the
        previous stage, or () for the first one. Return a tuple of tensors for the next stage, or the model's output
        from the stage that ends the chain. Raises StrategyError if the model calls its blocks in another order than
        when the chain was found.
        """
        lo, hi = self.ranges[index]
        if self._gates is None:
            return call(self.module, value)
        return self._gates.run(lo, hi, received, lambda: call(self.module, value))

    def idle(self) -> bool:
        """Return True if a forward has not reached the stage's first block yet."""
        return self._gates is not None and self._gates.idle()

    def close(self) -> None:
        """Remove the gates from the module."""
        if self._gates is not None:
            self._gates.remove()
            self._gates = None


def _without_cache(module: nn.Module) -> None:
    """Turn off the cache of HF models, which keeps keys and values of every block for generation on one device."""
    for part in module.modules():
        if getattr(config := getattr(part, "config", None), "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def _drop(module: nn.Module, holds: set[str], idle: Callable[[], bool]) -> None:
    """Replace every parameter that is not in `holds` by an `Absent`."""
    for name, places in homes(module).items():
        if name in holds:
            continue
        param = places[0][0]._parameters[places[0][1]]
        replace_submodule(places, None)
        if param is not None:
            absent = Absent(param, name, idle)
            for part, attribute in places:
                vars(part)[attribute] = absent
                put_aliases(part, attribute, absent)
