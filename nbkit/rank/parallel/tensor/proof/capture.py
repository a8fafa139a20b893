"""Watch one run of the whole model: the arguments of its modules, and uses of tensors that rule out a split.

Every operation is seen (TorchDispatchMode). Tensors are tracked by memory, not by Python object.

`CapturedCalls` records the arguments of calls, and finds the splits that are impossible. If an operation uses a weight
outside of the call of its map, the map cannot be split, because a rank holds only a part of the weight. If an operation
outside of the module that contains a pair uses tensors computed between the maps, the pair cannot be split, because a
rank computes only a part of these tensors. Nor may an attribute that a split changes (a number of heads) be read from
outside of that module.

`data_flow` finds which map's output goes into which other map. Plans are made from this (flow_plan.py). It follows
memory, operation by operation, from the output of a linear map to the maps that read it. The output of a map counts as
coming from that map alone. Whether a split is correct is left to the proof.

`under`, `relative_path` and `relative` convert paths of modules and pairs to and from a module above them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.proof.observe import Memory, memory_of, tensors_in, watched, written_by
from nbkit.rank.parallel.tensor.plan.flow_plan import MapFlow, Product
from nbkit.rank.parallel.tensor.plan.linear_types import adapters, core, is_linear, is_packed_attention
from nbkit.rank.parallel.tensor.plan.plan import Pair, TensorPlan, by_itself
from nbkit.rank.torch_private import pytree
from nbkit.rank.watching_mode import WatchingMode


def inside(path: str, above: str) -> bool:
    """Return True if `path` is the module at `above`, or inside it."""
    return not above or f"{path}.".startswith(f"{above}.")


def under(above: str, path: str) -> str:
    """Return `path`, which is relative to `above`, as a path from the root."""
    return f"{above}.{path}" if above and path else above or path


def relative_path(path: str, above: str) -> str:
    """Return `path`, which starts at the root, as a path relative to `above`."""
    return path[len(above) + 1 :] if above else path


def relative(pair: Pair, above: str) -> Pair:
    """Return `pair` with paths relative to `above`."""

    def short(path: str) -> str:
        return relative_path(path, above)

    widths = {short(path): sizes for path, sizes in pair.widths.items()}
    return replace(
        pair, owner=short(pair.owner), columns=tuple(map(short, pair.columns)), rows=tuple(map(short, pair.rows)),
        widths=widths,
    )  # fmt: skip


@dataclass(frozen=True)
class BlockInput:
    """A tensor in the arguments of a call.

    hangs: True if it was computed from parameters. If such a tensor is large, only its shape is kept, and `value` is
    zeros.
    """

    value: Tensor
    hangs: bool


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call, with tensors as `BlockInput`. training: mode of the called module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool


@dataclass
class CapturedCalls:
    """Record of watched runs of `model`, for the candidates of `plan`.

    calls: module -> its calls, for the requested modules. reads: module -> names of its own attributes that are read
    while it runs. refused: row map of a pair, or single module -> why it cannot be split. outside: row map of a pair ->
    {(module, attribute) read from outside of the pair's module: the reader}. hidden: module -> numbers of the leaves of
    its output that come from between the maps of a pair. loose: parameters of modules with pairs that are used while no
    such module around them runs.
    """

    model: nn.Module
    plan: TensorPlan
    calls: dict[str, list[CallArguments]] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    outside: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)
    hidden: dict[str, set[int]] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)

    def run(self, call: Callable[[], Any], paths: Collection[str]) -> None:
        """Watch `call`, which runs the model once, with gradients. paths: modules whose calls are recorded.

        Every parameter must require gradients (`thaw`), which shows which tensors are computed from parameters.
        """
        watch = _Watch(self, paths)
        with _reading(self.model, watch.read), watched(self.model, watch.enter, watch.leave), torch.enable_grad():
            with watch:
                output = call()
            watch.end(output)


class _Watch(WatchingMode):
    def __init__(self, seen: CapturedCalls, kept: Collection[str]) -> None:
        super().__init__()
        self.seen, self.kept = seen, kept
        self.active: list[str] = []
        self.weights: dict[Memory, tuple[set[str], set[str]]] = {}  # -> modules that may use it, keys of the plan
        self.between: dict[Memory, frozenset[str]] = {}  # -> row maps of the pairs between whose maps it lies
        self.names: dict[Memory, list[str]] = {}
        self.owners: dict[str, str] = {}
        self.columns: dict[str, str] = {}
        self.rows: dict[str, str] = {}
        model, plan = seen.model, seen.plan
        for pair in plan.pairs:
            (key,) = pair.rows
            self.owners[key] = pair.owner
            if pair.kind == "module":
                self._weigh(model.get_submodule(pair.owner), key, (pair.owner, key))
                self._weigh(model.get_submodule(key), key, (pair.owner, key))
                continue
            self.rows[key] = key
            self.columns |= dict.fromkeys(pair.columns, key)
            for path in (*pair.columns, key):
                self._weigh(model.get_submodule(path), key, (path,))
        for path, key in (*zip(plan.singles, plan.singles, strict=True), *((p, by_itself(p)) for p in plan.instead)):
            self._weigh(model.get_submodule(path), key, (path,))
        for name, param in model.named_parameters():
            if any(name.startswith(f"{pair.owner}." if pair.owner else "") for pair in plan.pairs):
                self.names.setdefault(memory_of(param), []).append(name)

    def _weigh(self, part: nn.Module, key: str, allowed: tuple[str, ...]) -> None:
        held = [core(part), *(m for _, *both in adapters(part) for m in both)] if is_linear(part) else [part]
        for module in held:
            for param in module._parameters.values():
                if param is not None:
                    users, keys = self.weights.setdefault(memory_of(param), (set(), set()))
                    users.update(allowed)
                    keys.add(key)

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.active.append(path)
        if path in self.kept:
            memo: dict[int, BlockInput] = {}
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: _given(x, memo), (args, kwargs))
            self.seen.calls.setdefault(path, []).append(CallArguments(args, kwargs, module.training))

    def leave(self, path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.active.pop()
        if path in self.columns:
            for tensor in tensors_in(output):
                self.between[memory_of(tensor)] = frozenset((self.columns[path],))
        elif path in self.rows:
            for tensor in tensors_in(output):
                self.between[memory_of(tensor)] = frozenset()
        elif (key := self._packed(path)) is not None:
            for number, tensor in enumerate(tensors_in(output)):
                self.between[memory_of(tensor)] = frozenset((key,)) if number else frozenset()
        for number, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and self.between.get(memory_of(leaf)):
                self.seen.hidden.setdefault(path, set()).add(number)

    def _packed(self, path: str) -> str | None:
        return next((key for key, owner in self.owners.items() if owner == path and key not in self.rows), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        lies: frozenset[str] = frozenset()
        for tensor in given:
            memory = memory_of(tensor)
            if not view:
                self._use(memory)
            lies |= self.between.get(memory, frozenset())
        if lies and not view:
            for key in lies:
                if func is torch.ops.aten._local_scalar_dense.default:
                    self._refuse(key, "it branches on a number that it computes between its linear layers")
                if not self._runs(self.owners[key]):
                    self._refuse(key, f"a value between its linear layers is used outside of it, by {self._user()}")
        if lies:
            for tensor in (*tensors_in(result), *written_by(func, args, kwargs)):
                memory = memory_of(tensor)
                self.between[memory] = self.between.get(memory, frozenset()) | lies
        return result

    def _use(self, memory: Memory) -> None:
        users, keys = self.weights.get(memory, ((), ()))
        if keys and not any(path in users for path in self.active):
            for key in keys:
                self._refuse(key, f"{self._user()} uses its weight without calling it")
        for name in self.names.get(memory, ()):
            owners = (owner for owner in self.owners.values() if name.startswith(f"{owner}." if owner else ""))
            if not any(self._runs(owner) for owner in owners):
                self.seen.loose.add(name)

    def read(self, path: str, name: str) -> None:
        """Note that the attribute `name` of the module at `path` is read."""
        if path in self.active:
            self.seen.reads.setdefault(path, set()).add(name)
        elif self.active:
            for key, owner in self.owners.items():
                if inside(path, owner) and not self._runs(owner):
                    self.seen.outside.setdefault(key, {}).setdefault((path, name), self._user())

    def end(self, output: Any) -> None:
        """Refuse pairs whose inner tensors outlive the run, in the output or in an attribute of a module."""
        places = [("the output of the model", output)]
        places += [(f"{path or 'the model'}.{name}", value) for path, part in self.seen.model.named_modules()
                   for name, value in vars(part).items() if name not in _OF_MODULES]  # fmt: skip
        for place, value in places:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    for key in self.between.get(memory_of(leaf), ()):
                        self._refuse(key, f"it keeps a value from between its linear layers in {place}")

    def _runs(self, owner: str) -> bool:
        return owner in self.active

    def _user(self) -> str:
        path = self.active[-1] if self.active else ""
        return path or f"{type(self.seen.model).__name__}.forward"

    def _refuse(self, key: str, why: str) -> None:
        self.seen.refused.setdefault(key, why)


def _given(tensor: Tensor, memo: dict[int, BlockInput]) -> BlockInput:
    value = tensor.detach()
    if tensor.requires_grad and tensor.numel() > _LARGE:
        value = value.new_zeros(()).expand(tensor.shape)  # the values of all layers would not fit in memory
    return memo.setdefault(id(tensor), BlockInput(value, tensor.requires_grad))


_LARGE = 1 << 18


_OF_MODULES = frozenset(vars(nn.Module()))


_noted: dict[int, Callable[[str], None]] = {}
"""id of a module -> the function that is called when one of its attributes is read."""
_noting = threading.Lock()


def _note(self: nn.Module, name: str) -> Any:
    """Replacement of `nn.Module.__getattribute__`, which is normally inherited from object."""
    if name not in _OF_MODULES and (note := _noted.get(id(self))) is not None:
        if name in super(nn.Module, self).__getattribute__("__dict__"):
            note(name)
    return super(nn.Module, self).__getattribute__(name)


@contextmanager
def _reading(model: nn.Module, note: Callable[[str, str], None]) -> Iterator[None]:
    """Call `note(path, attribute)` for every own attribute of a module that is read inside this context.

    The classes of the user's modules are not changed, because a forward may depend on them.
    """
    told = {id(part): partial(note, path) for path, part in model.named_modules()}
    with _noting:
        _noted.update(told)
        nn.Module.__getattribute__ = _note  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        with _noting:
            for each in told:
                del _noted[each]
            if not _noted:
                del nn.Module.__getattribute__


_PRODUCTS = {torch.ops.aten.bmm.default: 0, torch.ops.aten.baddbmm.default: 1}
"""Operation -> index of its first factor among its arguments."""


def data_flow(model: nn.Module, call: Callable[[], Any]) -> MapFlow:
    """Return the data flow that is observed while `call` runs the model once."""
    watch = _FlowWatch(model)
    with watched(model, watch.enter, watch.leave), torch.enable_grad(), watch, _Attends(watch):
        output = call()
    for tensor in tensors_in(output):
        watch.arrived(tensor, "")
    return watch.flow()


class _FlowWatch(WatchingMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sources: dict[str, set[str]] = {}
        self.readers: dict[str, set[str]] = {}
        self.products: dict[Product, None] = {}
        self.tables: set[str] = set()
        self.called: set[str] = set()
        self.maps: dict[str, bool] = {}  # -> whether it is a linear map
        for path, part in model.named_modules():
            if not any(path.startswith(f"{above}.") for above in self.maps):
                if is_linear(part) or is_packed_attention(part):
                    self.maps[path] = is_linear(part)
        self.come_from: dict[Memory, frozenset[str]] = {}
        self.ids: set[Memory] = set()
        self.within: list[str] = []
        self.attends = False

    def flow(self) -> MapFlow:
        """Return the data flow seen so far."""
        sources, readers = ({path: frozenset(others) for path, others in found.items()}
                            for found in (self.sources, self.readers))  # fmt: skip
        return MapFlow(sources, readers, tuple(self.products), frozenset(self.tables), frozenset(self.called))

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_in((args, kwargs))
        if not path:
            self.ids.update(memory_of(x) for x in given if not x.is_floating_point())
        if not self.within:
            self.called.add(path)
        if isinstance(module, nn.Embedding) and any(memory_of(x) in self.ids for x in given):
            self.tables.add(path)
        if path in self.maps:
            if not self.within:
                for tensor in given:
                    self.arrived(tensor, path)
                if self.maps[path]:
                    self.sources.setdefault(path, set())
            self.within.append(path)

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if path in self.maps:
            self.within.pop()
            for tensor in tensors_in(output):
                self.come_from[memory_of(tensor)] = frozenset((path,))

    def arrived(self, tensor: Tensor, path: str) -> None:
        """Note that `tensor` is an input of the map at `path`, or part of the model's output if `path` is ""."""
        for source in self.come_from.get(memory_of(tensor), ()):
            self.readers.setdefault(source, set()).add(path)
            if path:
                self.sources.setdefault(path, set()).add(source)

    def multiplied(self, first: Tensor, second: Tensor) -> None:
        """Note a product along the last dim of `first`, for each row and head."""
        from_first, from_second = (self.come_from.get(memory_of(x), frozenset()) for x in (first, second))
        if from_first and from_second and not self.within:
            dims = tuple(dict.fromkeys((first.shape[-1], first.shape[-2], second.shape[-1])))
            self.products[Product(from_first, from_second, dims)] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and not self.attends:
            self.multiplied(*args[_PRODUCTS[func] :][:2])
        given = [memory_of(x) for x in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        sources = frozenset[str]().union(*(self.come_from.get(memory, ()) for memory in given))
        of_ids = any(memory in self.ids for memory in given)
        for tensor in (*tensors_in(result), *written_by(func, args, kwargs)):
            memory = memory_of(tensor)
            if sources:
                self.come_from[memory] = self.come_from.get(memory, frozenset()) | sources
            if of_ids and not tensor.is_floating_point():
                self.ids.add(memory)
        return result


class _Attends(TorchFunctionMode):
    """Mode that sees calls of torch's attention before kernels get the tensors in other shapes."""

    def __init__(self, watch: _FlowWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key")
        query, key = (args[i] if i < len(args) else (kwargs or {})[name] for i, name in enumerate(names))
        self.watch.multiplied(query, key.transpose(-2, -1))
        self.watch.attends = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.attends = False
