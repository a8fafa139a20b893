"""The data axis of a strategy with ep=: one axis for the experts of this rank, and one for all other parameters.

The other parameters are distributed by dp and zero= over all ranks of dp. The gradients of a rank's experts are summed
over the dp / ep ranks that hold the same experts. With ZeRO 1 to 3 these ranks also share their optimizer state; with
ZeRO 2 and 3 they share gradients too.

A rank that makes fewer forwards than the others, because it has fewer rows, makes up for them in `finish`: its experts
compute the tokens of other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.buckets import Links
from nbkit.rank.parallel.data_parallel.data_axis import replicated
from nbkit.rank.parallel.data_parallel.ddp import ReplicaSetup
from nbkit.rank.parallel.data_parallel.zero1_2 import ShardedOptimizer
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.experts.dispatch import SpreadLayer
from nbkit.rank.parallel.module.block_discovery import within
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.module.forward_wrapper import repeats_collectives
from nbkit.rank.parallel.zero3.unit import Unit
from nbkit.rank.parallel.zero3.zero3 import Pass, ShardedParameters, alone
from nbkit.tensor_layout import Layout


class SpreadExperts(DataAxis):
    """A data axis made of two: `experts` for the experts of this rank, `rest` for the other parameters.

    layers: the layers of experts, in forward order. makes_up: True if ranks may make different numbers of forwards. In
    a pipeline they do not.
    """

    def __init__(
        self,
        module: nn.Module,
        rest: DataAxis,
        experts: DataAxis,
        layers: Sequence[SpreadLayer],
        device: torch.device,
        *,
        makes_up: bool,
    ) -> None:
        super().__init__()
        self.rest, self.experts, self.layers, self._device = rest, experts, tuple(layers), device
        self._both, self._makes_up, self._module = (rest, experts), makes_up, weakref.ref(module)
        order = {name: number for number, name in enumerate(homes(module))}
        self.held = dict(sorted({**rest.held, **experts.held}.items(), key=lambda each: order[each[0]]))
        self.layouts = {name: {**rest.layouts, **experts.layouts}[name] for name in self.held}
        self._passes, self._made, self._started, self._next = 1, 0, False, 0
        if isinstance(rest, ShardedParameters):
            self._numbers = _unit_numbers(rest.units, self.layers)
            rest.meanwhile = self._meanwhile

    @property
    def weights(self) -> dict[str, tuple[Tensor, Layout]]:
        return {**self.rest.weights, **self.experts.weights}

    @property
    def routed(self) -> Sequence[Mapping[int, int]]:
        return [dict(layer.routed) for layer in self.layers]

    @property
    def expert_times(self) -> Sequence[Sequence[tuple[Any, Any]]]:
        return [tuple(layer.times) for layer in self.layers]

    # The protocol of a step.

    def reset(self, *, passes: int = 1) -> None:
        self._passes, self._made, self._started, self._next = passes if self._makes_up else 0, 0, False, 0
        for layer in self.layers:
            layer.begin_again()
        for axis in self._both:
            axis.reset(passes=passes)

    def hold(self) -> None:
        self._made += self._ran()
        for axis in self._both:
            axis.hold()

    def start(self) -> None:
        self.rest.start()
        # Experts send gradients in the last pass of all. This rank may only make up for this pass.
        self._started = not self._passes or self._made + self._runs >= self._passes
        if self._started:
            self.experts.start()

    def finish(self) -> Tensor | None:
        own = self._ran()
        self._made += own
        if self._passes > self._made and own:
            if isinstance(self.rest, ShardedParameters):
                self.rest.hold()
            self.experts.hold()
        while self._passes > self._made:
            self._made += 1
            if self._made == self._passes and not self._started:
                self.experts.start()
            self.absent(backward=True)
            if self._made < self._passes:
                self.experts.hold()
        canaries = [canary for axis in self._both if (canary := axis.finish()) is not None]
        return torch.stack([canary.double() for canary in canaries]).amin() if canaries else None

    @property
    def _runs(self) -> bool:
        return any(layer.forwards for layer in self.layers)

    def _ran(self) -> bool:
        """Return True if a forward was made since the last call."""
        ran = self._runs
        for layer in self.layers:
            layer.forwards = 0
        return ran

    def absent(self, *, backward: bool = False) -> None:
        self.experts.absent(backward=backward)
        if isinstance(self.rest, ShardedParameters):
            self._next = 0
            self.rest.absent(backward=backward)  # it calls `_meanwhile`
            return
        self.rest.absent(backward=backward)
        for layer in self.layers:
            layer.absent(self._device, backward=backward)
        if backward:
            for number in reversed(range(len(self.layers))):
                self._absent_backward(number)

    def _meanwhile(self, number: int, which: Pass) -> None:
        """Take part in the exchanges of the layers up to ZeRO 3 unit `number`, which this rank does not run."""
        if which == "backward":
            while self._next and self._numbers[self._next - 1] >= number:
                self._next -= 1
                self._absent_backward(self._next)
            return
        while self._next < len(self.layers) and self._numbers[self._next] <= number:
            self.layers[self._next].absent(self._device, backward=which == "forward")
            self._next += 1

    def _absent_backward(self, number: int) -> None:
        """Take part in the backward pass of layer `number`, and in the recomputation of a block that ends with it."""
        block = self._recomputed(number)
        if block and block != self._recomputed(number + 1):
            for layer in self.layers[: number + 1]:
                if within(layer.layer.name, [block]):
                    layer.absent_again(self._device)
        self.layers[number].absent_backward()

    def _recomputed(self, number: int) -> str:
        """Return the name of the recomputed block around layer `number`, or ""."""
        module = self._module()
        if number == len(self.layers) or module is None:
            return ""
        path = self.layers[number].layer.name.split(".")
        around = (".".join(path[: depth + 1]) for depth in range(len(path)))
        return next((name for name in around if repeats_collectives(module.get_submodule(name))), "")

    def begin_again(self) -> None:
        self._next = 0
        for layer in self.layers:
            layer.begin_again()
        for axis in self._both:
            axis.begin_again()

    def let_go(self) -> None:
        for axis in self._both:
            axis.let_go()

    @contextmanager
    def calling(self, *, autocast: bool = False) -> Iterator[None]:
        with self.rest.calling(autocast=autocast), self.experts.calling(autocast=autocast):
            yield

    @contextmanager
    def computing(self, *, autocast: bool = False) -> Iterator[None]:
        with self.rest.computing(autocast=autocast), self.experts.computing(autocast=autocast):
            yield

    def break_off(self, *, broken: bool) -> bool:
        return all([axis.break_off(broken=broken) for axis in self._both])

    # Methods that both axes implement separately.

    def follow(self) -> None:
        for axis in self._both:
            axis.follow()

    def refresh(self) -> None:
        for axis in self._both:
            axis.refresh()

    def drop(self) -> None:
        for axis in self._both:
            axis.drop()

    def keep_open(self) -> None:
        for axis in self._both:
            axis.keep_open()

    def pass_over(self) -> None:
        for axis in self._both:
            axis.pass_over()

    def after_step(self) -> None:
        for axis in self._both:
            axis.after_step()

    def settle(self) -> None:
        for axis in self._both:
            axis.settle()

    def close(self) -> None:
        for axis in self._both:
            axis.close()
        # Otherwise only the garbage collector would free the memory.
        if isinstance(self.rest, ShardedParameters):
            self.rest.meanwhile = alone
        for layer in self.layers:
            layer.let_go()

    def leaves(self) -> list[nn.Parameter]:
        return [param for axis in self._both for param in axis.leaves()]

    def parts(self) -> list[nn.Parameter]:
        return [param for axis in self._both for param in axis.parts()]

    def tensors(self) -> Iterator[Tensor]:
        for axis in self._both:
            yield from axis.tensors()

    @property
    def is_open(self) -> bool:
        return any(axis.is_open for axis in self._both)


def _unit_numbers(units: Sequence[Unit], layers: Sequence[SpreadLayer]) -> list[int]:
    """Return for each layer the number of the unit with which it runs. The numbers never decrease."""
    found: list[int] = []
    for layer in layers:
        path = layer.layer.name
        around = [number for number, unit in enumerate(units) if number and f"{path}.".startswith(f"{unit.name}.")]
        found.append(max([*found[-1:], *around, 0]))
    return found


def spread_axis(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    axes: Axes,
    layers: Sequence[SpreadLayer],
    names: Collection[str],
    rest: Callable[[], DataAxis],
    *,
    zero: int,
    bucket: int,
    device: torch.device,
    makes_up: bool,
) -> SpreadExperts:
    """Allocate the memory of the skeleton `module`, and return its data axis. Sends nothing.

    layouts: of the parameters on this rank. names: names of the experts' parameters. rest: returns the data axis of the
    module's other parameters. zero, bucket: see `data_axis`. device, makes_up: see `SpreadExperts`.
    """
    with _only(module, lambda name: name not in names):
        other = rest()
    ranks, index, group = axes.size("edp"), axes.index("edp"), axes.group("edp")
    with _only(module, lambda name: name in names):
        own: DataAxis
        if zero and ranks > 1:
            own = ShardedOptimizer(
                module, layouts, Links(group, ranks, index, None, 0), zero=min(zero, 2), bucket=bucket
            )
        else:
            own = replicated(module, layouts, ReplicaSetup(ranks, index, group, None, bucket))
    return SpreadExperts(module, other, own, layers, device, makes_up=makes_up)


@contextmanager
def _only(module: nn.Module, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Remove all parameters from `module` inside this context, except those whose names are `wanted`."""
    hidden = [(place, getattr(*place)) for name, at in homes(module).items() if not wanted(name) for place in at]
    for (part, attribute), _ in hidden:
        part._parameters[attribute] = None
    try:
        yield
    finally:
        for (part, attribute), param in hidden:
            part._parameters[attribute] = param
