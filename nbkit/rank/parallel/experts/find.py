"""Find the layers whose experts can be spread over ranks, by running the model and watching the inputs of the experts.

Two forms are known. In the stacked form, one module holds all experts of a layer in weights whose dim 0 is the expert.
It is called with tokens, the experts that each token chose, and their weights, as in transformers. In the list form,
the experts are equal modules in a list. The module around the list calls each of them with the tokens that chose it.

The result is a guess. It is proven by comparing a whole step on several ranks with one process: see whole_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.module.copies import homes
from nbkit.strategy import Strategy
from nbkit.techniques.experts import experts_of
from nbkit.tensor_layout import Layout, runs_of


@dataclass(frozen=True)
class RoutedLayer:
    """A layer of experts.

    name: the path of the module that is called with tokens: the stacked experts, or the module around the list. count:
    the number of experts. width: number of features of a token. given: number of output features of an expert. stacked:
    the names of stacked parameters; () in the list form. experts: the paths of the modules in the list; () in the
    stacked form.
    """

    name: str
    count: int
    width: int
    given: int
    stacked: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    inside: tuple[tuple[str, int], ...] = ()
    """(name of a parameter, number of its expert), in the list form."""
    call: tuple[int | str, ...] = (0, 1, 2)
    """The positions or keywords of tokens, chosen experts and their weights, in the stacked form."""
    slots: float = 0.0
    """The number of rows per sample that go to experts, measured when the layer was found. Predictions use it."""


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of experts of a model, in the order in which a forward calls them. why: why there are none."""

    layers: tuple[RoutedLayer, ...] = ()
    why: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of the parameters of all experts."""
        return frozenset(self.place_of)

    @cached_property
    def place_of(self) -> dict[str, tuple[int, int, int, int]]:
        """Return parameter of experts -> (number of its layer, its first expert, how many experts, out of how many)."""
        found: dict[str, tuple[int, int, int, int]] = {}
        for number, layer in enumerate(self.layers):
            found |= {name: (number, 0, layer.count, layer.count) for name in layer.stacked}
            found |= {name: (number, expert, 1, layer.count) for name, expert in layer.inside}
        return found

    @property
    def fewest(self) -> int:
        """Return the number of experts in the layer that has the fewest."""
        return min((layer.count for layer in self.layers), default=0)

    def held(self, strategy: Strategy, index: int) -> list[tuple[int, ...]]:
        """Return, for each layer, the numbers of the experts on rank `index` of the ranks that share them."""
        moved = strategy.experts
        return [experts_of(moved, number, layer.count, strategy.ep, index) for number, layer in enumerate(self.layers)]

    def parts(self, whole: Mapping[str, Layout], strategy: Strategy, index: int) -> dict[str, Layout]:
        """Return the parts of the parameters in `whole` on rank `index` of those that share experts, in the same
        order."""
        found: dict[str, Layout | None] = dict(whole)
        for layer, mine in zip(self.layers, self.held(strategy, index), strict=True):
            for name in whole.keys() & set(layer.stacked):
                found[name] = whole[name].cut_runs(0, runs_of(mine))
            for name, number in layer.inside:
                if name in found and number not in mine:
                    found[name] = None
        return {name: layout for name, layout in found.items() if layout is not None}


def routing_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (tokens, chosen experts, their weights) from the arguments of stacked experts, or None for other
    arguments.

    tokens: floating point, [T, width]. chosen: integers, [T, k]. weights: floating point, [T, k]. The tokens come
    before the weights. There is no other tensor.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    whole = [tensor for tensor in tensors if tensor.dtype in (torch.int32, torch.int64)]
    if len(tensors) != 3 or len(floating) != 2 or len(whole) != 1:
        return None
    (tokens, weights), (chosen,) = floating, whole
    fits = tokens.ndim == chosen.ndim == 2 and weights.shape == chosen.shape and len(tokens) == len(chosen)
    return (tokens, chosen, weights) if fits else None


def called_with(layer: RoutedLayer, values: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the arguments (args, kwargs) with which stacked experts are called for `values`; see `routing_of`."""
    by_place = dict(zip(layer.call, values, strict=True))
    places = sorted(place for place in by_place if isinstance(place, int))
    return [by_place[place] for place in places], {k: v for k, v in by_place.items() if isinstance(k, str)}


def _places(args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Tensor]) -> tuple[int | str, ...]:
    """Return the position or keyword of each of `values` in the arguments."""
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return tuple(next(place for place, found in every if found is value) for value in values)


def find_routed(model: nn.Module, run: Callable[[], Any], *, rows: int = 1) -> RoutedLayers:
    """Run `model` and return its layers of experts. run: runs it once, on `rows` samples."""
    stacked, lists = list(_stacked(model)), list(_lists(model))
    if not stacked and not lists:
        return RoutedLayers(
            why="it has no module whose weights are stacked along a dim of experts, and no list of equal modules"
        )
    watch = _Watch(model, stacked, lists, rows)
    try:
        with torch.no_grad():
            run()
    finally:
        watch.end()
    return watch.found()


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (path, module, number of experts) of modules that contain only weights with the same dim 0."""
    places = homes(model)
    single = {id(getattr(*at[0])) for at in places.values() if len(at) == 1}
    for path, part in model.named_modules():
        own = [param for param in part._parameters.values() if param is not None]
        sizes = {param.shape[0] if param.ndim > 1 else 0 for param in own}
        alone = path and len(own) == len(list(part.parameters())) and all(id(param) in single for param in own)
        if alone and len(sizes) == 1 and min(sizes) > 1 and any(param.ndim == 3 for param in own):
            yield path, part, sizes.pop()


def _lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield (path, modules by path) of lists of several modules with equal structure and no shared parameters.

    A ModuleDict also counts as a list.
    """
    single = {id(getattr(*at[0])) for at in homes(model).values() if len(at) == 1}
    for path, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.ModuleDict) or len(part) < 2:
            continue
        inside = {f"{path}.{name}" if path else name: child for name, child in part.named_children()}
        kinds = {
            (type(child), *((n, tuple(p.shape)) for n, p in child.named_parameters())) for child in inside.values()
        }
        params = [param for child in inside.values() for param in child.parameters()]
        if len(kinds) == 1 and params and all(id(param) in single for param in params):
            yield path, inside


class _Watch:
    """Watches the inputs of experts in a forward."""

    def __init__(
        self,
        model: nn.Module,
        stacked: Sequence[tuple[str, nn.Module, int]],
        lists: Sequence[tuple[str, dict[str, nn.Module]]],
        rows: int,
    ) -> None:
        self._rows = rows
        self._layers, self._refused = dict[str, RoutedLayer](), dict[str, str]()
        self._inside: list[str] = []  # the modules that are running, outermost first
        # By path of a list: (expert, input, output) of its calls, and the surrounding module that calls them.
        self._calls: dict[str, list[tuple[int, Any, Any]]] = {}
        self._around: dict[str, str] = {}
        self._tokens: dict[str, int] = {}  # path of a module around a list -> elements of its input
        self._order: list[str] = []
        self._hooks: list[Any] = []
        for path, part, count in stacked:
            self._hooks.append(part.register_forward_hook(self._stacked_hook(path, count), with_kwargs=True))
        parents = {".".join(path.split(".")[:depth]) for path, _ in lists for depth in range(path.count(".") + 1)}
        for path, part in model.named_modules():
            if path in parents:
                self._hooks.append(part.register_forward_pre_hook(self._enter(path), with_kwargs=True))
                self._hooks.append(part.register_forward_hook(self._leave(path), always_call=True))
        for path, children in lists:
            for number, child in enumerate(children.values()):
                self._hooks.append(child.register_forward_hook(self._list_hook(path, number), with_kwargs=True))
        self._lists = dict(lists)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def found(self) -> RoutedLayers:
        for path, calls in self._calls.items():
            self._add_list(path, calls)
        layers = tuple(self._layers[path] for path in self._order if path in self._layers)
        if layers:
            return RoutedLayers(layers)
        why = "; ".join(f"{path or 'the model'!r} {how}" for path, how in list(self._refused.items())[:2])
        return RoutedLayers(why=why or "no list of equal modules was called with a part of the tokens")

    def _stacked_hook(self, path: str, count: int) -> Callable[..., None]:
        def called(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            routing = routing_of(args, kwargs)
            fits = routing is not None and isinstance(output, Tensor) and output.shape[:1] == routing[0].shape[:1]
            if routing is None or not fits or len(args) + len(kwargs) > len(routing):
                self._refused[path] = "is not called with only tokens, the experts that they chose and their weights"
                return
            tokens = routing[0]
            names = tuple(f"{path}.{name}" for name, param in part._parameters.items() if param is not None)
            call = _places(args, kwargs, routing)
            sizes = tokens.shape[-1], output.shape[-1]
            slots = routing[1].numel() / self._rows
            self._note(RoutedLayer(path, count, *sizes, stacked=names, call=call, slots=slots))

        return called

    def _enter(self, path: str) -> Callable[..., None]:
        def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.append(path)
            floating = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            self._tokens[path] = max((x.numel() for x in floating), default=0)

        return entered

    def _leave(self, path: str) -> Callable[..., None]:
        def left(*_: Any) -> None:
            while self._inside and self._inside.pop() != path:
                pass

        return left

    def _list_hook(self, path: str, number: int) -> Callable[..., None]:
        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            around = next(
                (outer for outer in reversed(self._inside) if not outer or path.startswith(f"{outer}.")), None
            )
            if around is None:
                self._refused[path] = "has no parent module that calls it"
                return
            self._around[path] = around
            if path not in self._calls:
                self._order.append(around)
            self._calls.setdefault(path, []).append((number, (args, kwargs), output))

        return called

    def _add_list(self, path: str, calls: Sequence[tuple[int, Any, Any]]) -> None:
        around, children = self._around[path], self._lists[path]
        widths, outputs, fewer = set[int](), set[int](), len({number for number, _, _ in calls}) < len(children)
        for _, (args, kwargs), output in calls:
            alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].is_floating_point()
            if not alone or not isinstance(output, Tensor) or args[0].ndim != 2 or output.ndim != 2:
                self._refused[path] = "has modules that are not called with tokens alone, [tokens, features]"
                return
            tokens = args[0]
            widths.add(tokens.shape[-1])
            outputs.add(output.shape[-1])
            fewer |= tokens.numel() < self._tokens[around]
        if len(widths) > 1 or len(outputs) > 1 or not fewer:
            self._refused[path] = "has modules that each get all tokens, so no tokens are routed"
            return
        if around in self._layers:
            self._refused[around] = "calls two lists of experts"
            del self._layers[around]
            return
        inside = tuple(
            (f"{at}.{name}", number)
            for number, (at, child) in enumerate(children.items())
            for name, _ in child.named_parameters()
        )
        slots = sum(len(args[0]) for _, (args, _), _ in calls) / self._rows
        self._layers[around] = RoutedLayer(
            around, len(children), widths.pop(), outputs.pop(), experts=tuple(children), inside=inside, slots=slots
        )

    def _note(self, layer: RoutedLayer) -> None:
        if (before := self._layers.get(layer.name)) is None:
            self._order.append(layer.name)
        else:
            layer = replace(layer, slots=layer.slots + before.slots)
        self._layers[layer.name] = layer
