"""Which map's output goes into which other map, in one run of the whole model: what a plan is made of (flow_plan.py).

Memory is followed, operation by operation, from the output of a linear map to the maps that read it; what a map gives
comes from that map alone. What happens on the way is not judged: that is the proof's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.proof.calls import watched
from nbkit.rank.parallel.proof.memory import Memory, memory_of, tensors_in, written_by
from nbkit.rank.parallel.tensor.plan.flow_plan import Flow, Product
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear, is_packed_attention
from nbkit.rank.watching_mode import WatchingMode

_PRODUCTS = {torch.ops.aten.bmm.default: 0, torch.ops.aten.baddbmm.default: 1}
"""Operation -> where its first factor stands among its arguments."""


def data_flow(model: nn.Module, call: Callable[[], Any]) -> Flow:
    """What was seen while `call` ran the model once."""
    watch = _Watch(model)
    with watched(model, watch.enter, watch.leave), torch.enable_grad(), watch, _Attends(watch):
        output = call()
    for tensor in tensors_in(output):
        watch.arrived(tensor, "")
    return watch.flow()


class _Watch(WatchingMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sources: dict[str, set[str]] = {}
        self.readers: dict[str, set[str]] = {}
        self.products: dict[Product, None] = {}
        self.tables: set[str] = set()
        self.called: set[str] = set()
        self.maps: dict[str, bool] = {}  # -> whether it is a linear one
        for path, part in model.named_modules():
            if not any(path.startswith(f"{above}.") for above in self.maps):
                if is_linear(part) or is_packed_attention(part):
                    self.maps[path] = is_linear(part)
        self.come_from: dict[Memory, frozenset[str]] = {}
        self.ids: set[Memory] = set()
        self.within: list[str] = []
        self.attends = False

    def flow(self) -> Flow:
        """What was seen."""
        sources, readers = ({path: frozenset(others) for path, others in found.items()}
                            for found in (self.sources, self.readers))  # fmt: skip
        return Flow(sources, readers, tuple(self.products), frozenset(self.tables), frozenset(self.called))

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
        """`tensor` is what the map at `path` is given, or a part of the output of the model."""
        for source in self.come_from.get(memory_of(tensor), ()):
            self.readers.setdefault(source, set()).add(path)
            if path:
                self.sources.setdefault(path, set()).add(source)

    def multiplied(self, first: Tensor, second: Tensor) -> None:
        """Along the last dim of `first`, for each row and head."""
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
    """Sees torch's attention as it is called: kernels are given other shapes."""

    def __init__(self, watch: _Watch) -> None:
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
