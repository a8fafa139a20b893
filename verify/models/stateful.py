"""Small models and losses that keep state besides parameters and buffers, or reach it by functions."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COUNT = 0
COUNTS: dict[str, Any] = {"calls": 0}
SEEN: list[float] = []
OF_MODELS: dict[Any, Any] = {}
WEAKLY: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def begin() -> None:
    """Reset all global state of this file that an earlier training has changed."""
    global COUNT
    COUNT = 0
    COUNTS.clear()
    COUNTS["calls"] = 0
    SEEN.clear()
    OF_MODELS.clear()
    ByClass.calls = 0
    damped.calls = 0  # type: ignore[attr-defined]
    warmed.__defaults__[0].clear()  # type: ignore[index]


class Base(nn.Module):
    """A layer, then `between`, then a head. All models here have these weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.init()

    def init(self) -> None:
        """Add what else a model has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x).tanh()))

    def between(self, h: Tensor) -> Tensor:
        return h


def _eased(h: Tensor, calls: float) -> Tensor:
    return h * (1 + 1 / (1 + calls))


class Hidden(Base):
    """Carries a hidden state from batch to batch."""

    def init(self) -> None:
        self.cell, self.state = nn.GRUCell(6, 6), None

    def between(self, h: Tensor) -> Tensor:
        state = self.cell(h, self.state)
        self.state = state.detach()
        return state


class Memory(Base):
    """Attends to the hidden states of earlier batches, in a list."""

    def init(self) -> None:
        self.memory: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        every = torch.stack([*self.memory, h], 1)
        self.memory = [*self.memory, h.detach()][-3:]
        return (torch.einsum("bd,bkd->bk", h, every).softmax(-1)[..., None] * every).sum(1)


class Remembering(Base):
    def init(self) -> None:
        self.past: deque[Tensor] = deque(maxlen=2)

    def between(self, h: Tensor) -> Tensor:
        found = h + sum(0.3 * each for each in self.past)
        self.past.append(h.detach())
        return found


class Calls(Base):
    def init(self) -> None:
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return _eased(h, self.calls)


class Tempered(Base):
    def init(self) -> None:
        self.temperature = 2.0

    def between(self, h: Tensor) -> Tensor:
        self.temperature = max(0.5, self.temperature * 0.8)
        return h / self.temperature


class Flipping(Base):
    def init(self) -> None:
        self.flip = False

    def between(self, h: Tensor) -> Tensor:
        self.flip = not self.flip
        return h if self.flip else -h.relu()


class Moded(Base):
    def init(self) -> None:
        self.mode, self.calls = "warm", 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.mode = "hot"
        return h if self.mode == "warm" else 2 * h


class Iterating(Base):
    def init(self) -> None:
        self.numbers = itertools.count(1)

    def between(self, h: Tensor) -> Tensor:
        return _eased(h, next(self.numbers))


class ByGlobal(Base):
    def between(self, h: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return _eased(h, COUNT)


class ByGlobalDict(Base):
    def between(self, h: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return _eased(h, COUNTS["calls"])


class ByClass(Base):
    calls = 0

    def between(self, h: Tensor) -> Tensor:
        ByClass.calls += 1
        return _eased(h, ByClass.calls)


class ByClosure(Base):
    def init(self) -> None:
        calls = 0

        def counted() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.counted = counted

    def between(self, h: Tensor) -> Tensor:
        return _eased(h, self.counted())


@dataclass
class Schedule:
    step: int = 0

    def next(self) -> float:
        self.step += 1
        return float(self.step)


class ByObject(Base):
    def init(self) -> None:
        self.schedule = Schedule()

    def between(self, h: Tensor) -> Tensor:
        return _eased(h, self.schedule.next())


class Nested(Base):
    def init(self) -> None:
        self.state: dict[str, Any] = {"of": {"calls": [0]}}

    def between(self, h: Tensor) -> Tensor:
        self.state["of"]["calls"][0] += 1
        return _eased(h, self.state["of"]["calls"][0])


class Every3(Base):
    """Changes its computation only in every third pass."""

    def init(self) -> None:
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls % 3 == 0 else h


class TensorCount(Base):
    def init(self) -> None:
        self.calls = torch.zeros(())

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return _eased(h, self.calls)  # type: ignore[arg-type]


class Centred(Base):
    """Keeps a running mean over rows in an attribute."""

    def init(self) -> None:
        self.mean = torch.zeros(6)

    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class CentredFloat(Base):
    def init(self) -> None:
        self.mean = 0.0

    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(h.detach().mean())
        return h - self.mean


class EarlyExit(Base):
    """Branches on the mean of the batch."""

    def between(self, h: Tensor) -> Tensor:
        return h if float(h.detach().mean()) > 0 else h.relu() * 2


class FirstRow(Base):
    """Branches on the first row of the batch."""

    def between(self, h: Tensor) -> Tensor:
        return h if bool(h[0].sum() > 0) else -2 * h


class Cached(Base):
    """Keeps a table, which it can recompute, and its last input, which it never reads."""

    def init(self) -> None:
        self.tables: dict[int, Tensor] = {}
        self.calls, self.last = 0, None

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.last = h.detach()
        table = self.tables.setdefault(h.shape[-1], torch.linspace(0.5, 1.5, h.shape[-1]))
        return h * table


class Tabled(Base):
    """Keeps a table and its length, as rotary embeddings do, and a count that it never reads."""

    def init(self) -> None:
        self.table, self.length, self.calls = None, 0, 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        if h.shape[-1] > self.length:
            self.length = h.shape[-1]
            self.table = torch.linspace(0.5, 1.5, self.length)
        return h * self.table[: h.shape[-1]]


class Recurrent(Base):
    """An nn.LSTM, which holds its weights in a list too."""

    def init(self) -> None:
        self.cells = nn.LSTM(6, 6, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        return self.cells(h[:, None])[0][:, 0]


class Normed(Base):
    """Spectral norm: torch computes the weight in each pass, and updates a vector in a buffer."""

    def init(self) -> None:
        self.body = nn.utils.spectral_norm(self.body)


class CountsClasses(Base):
    def init(self) -> None:
        self.register_buffer("counts", torch.ones(6, dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.counts += torch.bincount(h.detach().argmax(-1), minlength=6)
        return h / self.counts


class CountsRows(Base):
    def init(self) -> None:
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        self.rows += len(h)
        return h * (1 + 1 / (1 + self.rows))


class CountsPasses(Base):
    def init(self) -> None:
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        self.passes += 1
        return h * (1 + 1 / (1 + self.passes))


class Unkept(Base):
    """Counts in a buffer that is not in checkpoints."""

    def init(self) -> None:
        self.register_buffer("rows", torch.zeros(()), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        self.rows += len(h)
        return h * (1 + 1 / (1 + self.rows))


class ViewBuffer(Base):
    """A buffer that is a view of a parameter."""

    def init(self) -> None:
        self.scale = nn.Parameter(torch.ones(2, 6))
        self.register_buffer("first", self.scale.data[0])

    def between(self, h: Tensor) -> Tensor:
        return h * self.first * self.scale[1]


class ByHand(Base):
    """A layer in a plain list, whose weights are registered by hand."""

    def init(self) -> None:
        self.layers = [nn.Linear(6, 6)]
        self.weight, self.bias = self.layers[0].weight, self.layers[0].bias

    def between(self, h: Tensor) -> Tensor:
        return self.layers[0](h)


class Teacher(Base):
    """Keeps an average of the layer, which is not registered, and changes it in each pass."""

    def init(self) -> None:
        self.others = [copy.deepcopy(self.body)]

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, own in zip(self.others[0].parameters(), self.body.parameters(), strict=True):
                mean.lerp_(own, 0.1)
            shift = self.others[0](h)
        return h + shift


class Drawing(Base):
    def init(self) -> None:
        self.draw = random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return h * (0.5 + self.draw.random())


class Between(Base):
    """Counts in one part, and reads the count in another."""

    def init(self) -> None:
        self.counter = Schedule()
        self.reader = _Reader(self.counter)

    def between(self, h: Tensor) -> Tensor:
        self.counter.next()
        return self.reader(h)


class _Reader(nn.Module):
    def __init__(self, counter: Schedule) -> None:
        super().__init__()
        self.counter, self.layer = counter, nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        return _eased(self.layer(h), self.counter.step)


class Lambdas(Base):
    """Calls its layers by functions in a list, which close over the module."""

    def init(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.ops: list[Callable[[Tensor], Tensor]] = [lambda x, i=i: x + self.blocks[i](x).tanh() for i in range(3)]

    def between(self, h: Tensor) -> Tensor:
        for op in self.ops:
            h = op(h)
        return h


class Patched(Base):
    """A layer whose forward was replaced by a function around the old one, as adapters do."""

    def init(self) -> None:
        old, self.low, self.high = self.body.forward, nn.Linear(6, 2), nn.Linear(2, 6)
        self.body.forward = lambda x: old(x) + self.high(self.low(x))  # type: ignore[method-assign]


class OfAnother(Base):
    """A dict of functions, one of which is a method of another part."""

    def init(self) -> None:
        self.mix = nn.Linear(6, 6)
        self.ways = {"mix": lambda x: self.mix(self.body(x)).tanh()}

    def between(self, h: Tensor) -> Tensor:
        return h + self.ways["mix"](h)


class CountingLambda(Base):
    """A function that counts in the module over which it closes."""

    def init(self) -> None:
        self.calls = 0

        def count() -> int:
            self.calls += 1
            return self.calls

        self.count = count

    def between(self, h: Tensor) -> Tensor:
        return _eased(h, self.count())


class OnWeight(Base):
    """Counts in an attribute of a parameter."""

    def between(self, h: Tensor) -> Tensor:
        weight: Any = self.body.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return _eased(h, weight.calls)


class RunningOnWeight(Base):
    def init(self) -> None:
        self.head.weight.running = torch.zeros(6)  # type: ignore[assignment]

    def between(self, h: Tensor) -> Tensor:
        weight: Any = self.head.weight
        weight.running = 0.5 * weight.running + 0.5
        return h * (1 + weight.running)


class ReadsMark(Base):
    """Reads an attribute that was set on a parameter."""

    def init(self) -> None:
        self.body.weight.scale = 3.0  # type: ignore[assignment]

    def between(self, h: Tensor) -> Tensor:
        return h * self.body.weight.scale


class Cycling(Base):
    def init(self) -> None:
        self.scales = itertools.cycle([1.0, 0.5, 2.0])

    def between(self, h: Tensor) -> Tensor:
        return h * next(self.scales)


class Generating(Base):
    """Advances a generator that has two names."""

    def init(self) -> None:
        def scales() -> Iterator[float]:
            scale = 1.0
            while True:
                yield scale
                scale = 0.7 * scale + 0.1

        self.scales = scales()
        self.held = [self.scales]

    def between(self, h: Tensor) -> Tensor:
        return h * (next(self.scales) + next(self.held[0]))


class BoundNext(Base):
    """Advances an iterator through a bound method, which cannot be replaced by a copy."""

    def init(self) -> None:
        self.scale = itertools.cycle([1.0, 0.5, 2.0]).__next__

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale()


class OnceComputed(Base):
    """Computes a table from the weights in its first pass, and keeps it."""

    @functools.cached_property
    def table(self) -> Tensor:
        return self.body.weight.detach().sum(0)

    def between(self, h: Tensor) -> Tensor:
        return h + self.table


class OnceCached(Base):
    @functools.lru_cache  # noqa: B019
    def table(self) -> Tensor:
        return self.body.weight.detach().sum(0)

    def between(self, h: Tensor) -> Tensor:
        return h + self.table()


class ByItself(Base):
    """Counts in a dict with the module itself as the key."""

    def between(self, h: Tensor) -> Tensor:
        OF_MODELS[self] = OF_MODELS.get(self, 0) + 1
        return _eased(h, OF_MODELS[self])


class WeaklyByItself(Base):
    def between(self, h: Tensor) -> Tensor:
        WEAKLY[self] = WEAKLY.get(self, 0) + 1
        return _eased(h, WEAKLY[self])


MODELS: tuple[type[Base], ...] = (
    *(Hidden, Memory, Remembering, Calls, Tempered, Flipping, Moded, Iterating, ByGlobal, ByGlobalDict, ByClass),
    *(ByClosure, ByObject, Nested, Every3, TensorCount, Centred, CentredFloat, EarlyExit, FirstRow, Cached),
    Tabled,
    Recurrent,
    Normed,
    *(CountsClasses, CountsRows, CountsPasses, Unkept, ViewBuffer, ByHand, Teacher, Drawing, Between),
    *(Lambdas, Patched, OfAnother, CountingLambda),
    *(OnWeight, RunningOnWeight, ReadsMark, Cycling, Generating, BoundNext, OnceComputed, OnceCached, ByItself),
    WeaklyByItself,
)


def plain(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def damped(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that depends on an attribute of this function."""
    damped.calls += 1  # type: ignore[attr-defined]
    return F.cross_entropy(output, target) * (1 + 1 / (1 + damped.calls))  # type: ignore[attr-defined]


def warmed(output: Tensor, target: Tensor, seen: list[float] = []) -> Tensor:  # noqa: B006
    """Return a loss that depends on a list in the default of an argument."""
    seen.append(1.0)
    return F.cross_entropy(output, target) * min(1.0, 0.2 * len(seen))


def relative(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss divided by the mean of the last losses."""
    loss = F.cross_entropy(output, target)
    SEEN.append(float(loss.detach()))
    return loss / (sum(SEEN[:-1][-3:]) / len(SEEN[:-1][-3:]) if len(SEEN) > 1 else 1.0)


LOSSES = (damped, warmed, relative)
