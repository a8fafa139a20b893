"""Models in which functions hold parts of the model: closures, patched forwards, hooks, unregistered parts.

Each is an ordinary way to write or change a model. `MODELS` has the functions that build them. (rows, 4, 8) ->
(rows, 4, 8).
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, ROWS, POSITIONS = 8, 8, 4


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, number: int = 2) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.blocks = nn.ModuleList(block() for _ in range(number))
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


class LambdaBlock(nn.Module):
    """A lambda in an attribute, as in karpathy/minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D)})
        m = self.mlp
        self.mlpf: Any = lambda x: m["down"](torch.tanh(m["up"](x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(self.norm(x))


class DefaultBlock(Block):
    """A lambda whose default argument holds the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.f: Any = lambda x, up=self.up, *, down=self.down: down(torch.tanh(up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


def _apply(up: Any, down: Any, x: Tensor) -> Tensor:
    return down(torch.tanh(up(x)))  # type: ignore[no-any-return]


class PartialBlock(Block):
    """functools.partial over layers, and over a lambda that closes over one."""

    def __init__(self) -> None:
        super().__init__()
        self.f: Any = partial(_apply, lambda x: self.up(x), self.down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class WeightsBlock(Block):
    """Closures over weights."""

    def __init__(self) -> None:
        super().__init__()
        weight, bias, down = self.up.weight, self.up.bias, self.down.weight
        self.f: Any = lambda x: F.linear(torch.tanh(F.linear(x, weight, bias)), down)
        self.down.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class PartialWeightsBlock(Block):
    """functools.partial that holds weights, by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.f: Any = partial(F.linear, weight=self.up.weight, bias=self.up.bias)
        self.g: Any = partial(torch.addcmul, self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.f(self.norm(x)))
        return x + F.linear(y, self.down.weight) + self.g(x, x, value=0.1)


class AttentionBlock(Block):
    """Attention whose projections are closures."""

    def __init__(self) -> None:
        super().__init__()
        q, k, v, self.mix = (nn.Linear(D, D) for _ in range(4))
        self.q, self.k, self.v = q, k, v
        mix = self.mix
        self.project: Any = lambda x: [part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v)]
        self.join = {"mix": lambda y: mix(y.transpose(1, 2).flatten(2))}

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.join["mix"](F.scaled_dot_product_attention(*self.project(self.norm(x)), is_causal=True))
        return super().forward(x)


class ListBlock(Block):
    """Functions in lists, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [lambda x: self.norm(x), lambda x: torch.tanh(self.up(x))]
        self.last = {"down": (lambda x: self.down(x), "named")}

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for step in self.steps:
            y = step(y)
        return x + self.last["down"][0](y)  # type: ignore[operator]


class NestedBlock(Block):
    """A function in a function, which counts and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def outer() -> Callable[[Tensor, int], Tensor]:
            def inner(x: Tensor, depth: int) -> Tensor:
                nonlocal calls
                calls += 1
                return inner(self.down(torch.tanh(self.up(x))), depth - 1) if depth else x

            return inner

        self.f: Any = outer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x), 2)


class WrappedBlock(Block):
    """A decorated function with an attribute that holds a layer."""

    def __init__(self) -> None:
        super().__init__()

        @functools.wraps(self.up.forward)
        def f(x: Tensor) -> Tensor:
            return f.down(torch.tanh(self.up(x)))  # type: ignore[attr-defined, no-any-return]

        f.down = self.down  # type: ignore[attr-defined]
        self.f: Any = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class Op:
    """A plain object that calls a layer."""

    def __init__(self, part: nn.Module, f: Any) -> None:
        self.part, self.f = part, f

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(self.part(x))  # type: ignore[no-any-return]


class ObjectBlock(Block):
    """A plain object with a layer and a closure in it."""

    def __init__(self) -> None:
        super().__init__()
        self.op = Op(self.up, lambda x: self.down(torch.tanh(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.op(self.norm(x))


class MethodBlock(Block):
    """Bound methods in attributes, one of them of a function with a closure."""

    def __init__(self) -> None:
        super().__init__()
        down = self.down

        def f(part: nn.Module, x: Tensor) -> Tensor:
            return down(torch.tanh(part.up(x)))  # type: ignore[no-any-return, operator]

        self.f, self.g = types.MethodType(f, self), self.norm.forward

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.g(x))


class WeakBlock(Block):
    """A part with a weak reference to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up.owner = weakref.ref(self)  # type: ignore[assignment]
        self.f: Any = lambda part, x: part.owner().down(torch.tanh(part(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.up, self.norm(x))


class CachedBlock(Block):
    """A cached function that returns a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Any = functools.lru_cache(lambda name: getattr(self, name))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part("down")(torch.tanh(self.part("up")(self.norm(x))))


class BorrowedBlock(Block):
    """A layer that is no submodule, whose weights are registered by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [nn.Linear(D, D), nn.Sequential(nn.Linear(D, D))]
        for i, part in enumerate(self.extra):
            for name, p in part.named_parameters():
                self.register_parameter(f"extra{i}_{name.replace('.', '_')}", p)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra[1](torch.sin(self.extra[0](x)))


class BufferBlock(Block):
    """A closure over a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D))
        scale = self.scale
        self.f: Any = lambda x: x * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.f(super().forward(x))  # type: ignore[no-any-return]


def patched(model: nn.Module) -> nn.Module:
    """Replace the forward of some layers by one that calls the old one, as quantizers do."""

    def patch(part: nn.Linear) -> None:
        old = part.forward
        part.forward = lambda x: old(x) * 1.1  # type: ignore[method-assign, assignment]

    for block in model.blocks:  # type: ignore[union-attr]
        patch(block.up)  # type: ignore[union-attr, arg-type]
    return model


def patched_block(model: nn.Module) -> nn.Module:
    """Replace the forward of whole blocks."""
    for block in model.blocks:  # type: ignore[union-attr]
        old = block.forward
        block.forward = lambda x, old=old: old(x) + 0.1 * x  # type: ignore[union-attr]
    return model


def lora(model: nn.Module) -> nn.Module:
    """Add low-rank updates to layers by hand."""

    def wrap(part: nn.Linear) -> None:
        old = part.forward
        part.a, part.b = nn.Linear(D, 2, bias=False), nn.Linear(2, 2 * D, bias=False)
        part.forward = lambda x: old(x) + part.b(part.a(x))  # type: ignore[method-assign, assignment, operator]

    for block in model.blocks:  # type: ignore[union-attr]
        wrap(block.up)  # type: ignore[union-attr, arg-type]
        block.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def hooked(model: nn.Module) -> nn.Module:
    """Add the output of another layer in a hook."""
    for block in model.blocks:  # type: ignore[union-attr]
        norm = block.norm  # type: ignore[union-attr]
        block.down.register_forward_hook(lambda part, args, y, norm=norm: y + norm(y))  # type: ignore[union-attr]
    return model


def hooked_before(model: nn.Module) -> nn.Module:
    """Multiply the input by a weight of another layer, in a hook before forward."""
    for block in model.blocks:  # type: ignore[union-attr]

        def before(part: nn.Module, args: Any, block: Any = block) -> Any:
            return (args[0] * block.norm.weight,)

        block.up.register_forward_pre_hook(before)  # type: ignore[union-attr]
    return model


def hooked_root(model: nn.Module) -> nn.Module:
    """Use the first layer in a hook on the whole model."""
    model.register_forward_hook(lambda part, args, y: y + 0.1 * model.inp(y))  # type: ignore[operator]
    return model


def tied_by_closure(model: nn.Module) -> nn.Module:
    """Make the output layer use the weight of the input layer."""
    weight = model.inp.weight
    model.out.forward = lambda x: F.linear(x, weight.t())  # type: ignore[union-attr, method-assign]
    del model.out.bias, model.out.weight
    return model


def shared_part(model: nn.Module) -> nn.Module:
    """Make every block call a layer of the model."""
    model.shared = nn.Linear(D, D)
    shared = model.shared
    for block in model.blocks:  # type: ignore[union-attr]
        old = block.forward
        block.forward = lambda x, old=old: old(x) + torch.tanh(shared(x))  # type: ignore[union-attr]
    return model


class OwnLoop(Net):
    """A list of lambdas to run, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = [lambda x, i=i: self.blocks[i](x) for i in range(len(self.blocks))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for op in self.ops:
            x = op(x)
        return self.out(x)  # type: ignore[no-any-return]


class ForwardOfObject(Net):
    """A closure as the forward of the model."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inp, out = self.blocks, self.inp, self.out

        def run(x: Tensor) -> Tensor:
            x = inp(x)
            for block in blocks:
                x = block(x)
            return out(x)  # type: ignore[no-any-return]

        self.forward = run  # type: ignore[method-assign]


def local_class() -> nn.Module:
    """Return a model whose blocks have a class that closes over a layer."""
    model = Net()
    inp = model.inp

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * inp(x)

    for block in model.blocks:
        block.__class__ = Inner
    return model


def global_part() -> nn.Module:
    """Return a model whose blocks find a layer by a global name."""
    model = Net()
    _GLOBAL["inp"] = model.inp
    for block in model.blocks:
        block.__class__ = GlobalBlock
    return model


_GLOBAL: dict[str, Any] = {}


class GlobalBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * _GLOBAL["inp"](x)


class LazyHooks(Net):
    """Installs hooks in its first forward, and remembers that, as transformers does to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_hooks_installed", False):
            for block in self.blocks:
                block.register_forward_hook(lambda part, args, y: vars(part)["_sink"].append(y))
            self._hooks_installed = True
        seen = list[Tensor]()
        for block in self.blocks:
            vars(block)["_sink"] = seen
        y = super().forward(x)
        return y + sum(s.pow(2).mean((1, 2), keepdim=True) for s in seen)


class ByClass(Block):
    """Uses its class: counts in it, asks for it, looks up a number by it, and calls its base."""

    calls = 0

    def __init_subclass__(cls) -> None:
        _SCALES[cls] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        y: Tensor = super(type(self), self).forward(x)  # type: ignore[misc]
        return y * _SCALES.get(self.__class__, 1.0) if type(self) is ByClass else x


_SCALES: dict[type, float] = {}


class AsksItsParts(Net):
    """Uses the classes of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if type(block) is ByClass else x
            x = x + sum(part.weight.mean() for part in block.modules() if type(part) is nn.LayerNorm)
        return self.out(x) if type(self.out) is nn.Linear else x


class Weakly(Net):
    """Holds weak references to its parts, and uses the parts as keys and as members of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.head = weakref.ref(self.out)
        self.few, self.scales = weakref.WeakSet(self.blocks), weakref.WeakKeyDictionary({self.blocks[0]: 1.2})
        self.first, self.names = weakref.WeakMethod(self.inp.forward), {self.blocks[1]: 0.9}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first()(x)  # type: ignore[misc]
        for block in self.blocks:
            x = block(x) * self.scales.get(block, 1.0) * self.names.get(block, 1.0) if block in self.few else x
        return self.head()(x)  # type: ignore[misc, no-any-return]


class ByProxy(Net):
    """Calls a layer through a weakref.proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [weakref.proxy(self.out)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.heads[0](x)  # type: ignore[no-any-return]


def siblings() -> nn.Module:
    """Return a model with a block and its shallow copy: two modules with the same parts."""
    model = Net(number=1)
    model.blocks.append(copy.copy(model.blocks[0]))
    return model


class Patched(Block):
    """A block whose class gets another forward from `patched_class`."""


def patched_class() -> nn.Module:
    """Return a model, and patch its class at each call."""
    old = Patched.forward
    Patched.forward = lambda self, x: old(self, x) * 1.1  # type: ignore[method-assign]
    return Net(Patched)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lambda": lambda: Net(LambdaBlock),
    "default": lambda: Net(DefaultBlock),
    "partial": lambda: Net(PartialBlock),
    "weights": lambda: Net(WeightsBlock),
    "partial of weights": lambda: Net(PartialWeightsBlock),
    "attention": lambda: Net(AttentionBlock),
    "list": lambda: Net(ListBlock),
    "nested": lambda: Net(NestedBlock),
    "wrapped": lambda: Net(WrappedBlock),
    "object": lambda: Net(ObjectBlock),
    "method": lambda: Net(MethodBlock),
    "weak": lambda: Net(WeakBlock),
    "cached": lambda: Net(CachedBlock),
    "borrowed": lambda: Net(BorrowedBlock),
    "buffer": lambda: Net(BufferBlock),
    "patched": lambda: patched(Net()),
    "patched block": lambda: patched_block(Net()),
    "patched twice": lambda: patched(patched(Net())),
    "lora": lambda: lora(Net()),
    "hook": lambda: hooked(Net()),
    "hook before": lambda: hooked_before(Net()),
    "hook of the whole": lambda: hooked_root(Net()),
    "tied by closure": lambda: tied_by_closure(Net()),
    "shared part": lambda: shared_part(Net()),
    "list of blocks": OwnLoop,
    "forward of the object": ForwardOfObject,
    "lambda and patch": lambda: patched_block(Net(LambdaBlock)),
    "lora and hook": lambda: hooked(lora(Net())),
    "lazy hooks": LazyHooks,
    "local class": local_class,
    "global": global_part,
    "class": lambda: AsksItsParts(ByClass),
    "weakly": Weakly,
    "by proxy": ByProxy,
    "siblings": siblings,
}
ONCE = {"patched class": patched_class}
"""Models that a process must not build more than once."""


def built(name: str) -> nn.Module:
    """Return the model in float64, initialized from a fixed seed."""
    torch.manual_seed(0)
    return (MODELS | ONCE)[name]().double()


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    """Return values and targets, both (ROWS, POSITIONS, D)."""
    draw = torch.Generator().manual_seed(number)
    values = torch.randn(ROWS, POSITIONS, D, generator=draw, dtype=torch.float64)
    return values, values.roll(1, -1)


def plainly(name: str, steps: int) -> list[float]:
    """Train the model in one process, in plain torch, and return the losses."""
    model, losses = built(name), list[float]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(steps):
        values, targets = batch(step)
        loss = F.mse_loss(model(values), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
