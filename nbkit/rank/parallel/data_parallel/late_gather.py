"""Updated parameters on their way: gathered while the next forward computes, and waited for where it reads them.

After the optimizer's step a rank has its own part of every parameter. The parts of the others come bucket by bucket,
two under way, in the order in which they are sent. Until then a module has in the place of its dict of parameters one
that waits when it is looked into: whoever does so, the module's own forward, another module's or a user's hook, finds
whole parameters. So nobody has to know which module reads what, and nothing is read that has not come.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.parameter_aliases import aliased

_UNDER_WAY = 2  # their memory is there beside the parameters'


class Gathered(Protocol):
    """A bucket of parameters. gather: send this rank's part; spread: put those of all ranks into the parameters."""

    def gather(self) -> tuple[Tensor, dist.Work]: ...

    def spread(self, matrix: Tensor) -> None: ...


Waiting = Mapping[int, Sequence[nn.Module]]
"""Number of a bucket -> the modules that have all of their parameters when it has come."""


class LateGather:
    """The buckets of one step, from when they are sent until they have come. Any thread may wait for them.

    missing: buckets that have not come. group: along which they do.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.missing = group, 0
        self._inner: Any = None
        self._left: deque[Gathered] = deque()
        self._under_way: deque[tuple[Gathered, Tensor, dist.Work]] = deque()
        self._number = 0  # of the bucket that comes next
        self._stand_ins: dict[int, list[_StandIn]] = {}
        self._lock = threading.RLock()

    def begin(self, buckets: Sequence[Gathered], waiting: Waiting) -> None:
        """Send `buckets`, in this order."""
        with self._lock:
            self.missing, self._number, self._left = len(buckets), 0, deque(buckets)
            self._inner = getattr(self.group, "inner", None)
            for _ in range(_UNDER_WAY):
                self._send()
            for number, modules in waiting.items():
                self._stand_ins[number] = [_StandIn(module, self, number) for module in modules]

    def wait(self, number: int | None = None, *, until: float | None = None) -> None:
        """Return when bucket `number` has come, and those before it; None: all. until: at the latest (monotonic)."""
        if not self.missing:
            return
        with self._lock:
            while self._under_way and (number is None or self._number <= number):
                bucket, matrix, work = self._under_way[0]
                work.wait(*([] if until is None else [timedelta(seconds=max(until - time.monotonic(), 0.001))]))
                bucket.spread(matrix)
                del matrix
                # What was interrupted before this line is done again.
                self._under_way.popleft()
                self.missing -= 1
                for stand_in in self._stand_ins.pop(self._number, ()):
                    stand_in.leave()
                self._number += 1
                self._send()

    def end(self, seconds: float) -> bool:
        """Nothing is under way any more; whether all has come. It is waited for so long, where the group still works:
        a rank that failed in its update sends nothing."""
        # On a device nobody is told that what was broken off never came.
        if seconds and getattr(self.group, "inner", None) is self._inner:
            with suppress(RuntimeError, TrainingError):
                self.wait(until=time.monotonic() + seconds)
        whole = not self.missing
        self._forget()
        return whole

    def _send(self) -> None:
        if self._left:
            bucket = self._left.popleft()
            self._under_way.append((bucket, *bucket.gather()))

    def _forget(self) -> None:
        self.missing = 0
        self._left.clear()
        self._under_way.clear()
        for stand_in in [one for some in self._stand_ins.values() for one in some]:
            stand_in.leave()
        self._stand_ins.clear()


class _StandIn(dict[str, Any]):
    """Stands for a module's dict of parameters until bucket `number` has come. Itself it is empty: who looks past its
    methods, as C code can, finds nothing rather than old numbers."""

    def __init__(self, module: nn.Module, late: LateGather, number: int) -> None:
        super().__init__()
        self.attributes, self.late, self.number = vars(module), late, number
        self.real: dict[str, Any] = self.attributes["_parameters"]
        self.attributes["_parameters"] = self

    def leave(self) -> None:
        """The module has its own dict again."""
        if self.attributes["_parameters"] is self:
            self.attributes["_parameters"] = self.real

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.late.wait(self.number)
        return dict, (dict(self.real),)


def _waiting(name: str) -> Callable[..., Any]:
    def look(self: _StandIn, *args: Any, **kwargs: Any) -> Any:
        self.late.wait(self.number)
        return getattr(self.real, name)(*args, **kwargs)

    look.__name__ = name
    return look


for _name in (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__",
    "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
):  # fmt: skip
    setattr(_StandIn, _name, _waiting(_name))


def compiles() -> bool:
    """Whether torch.compile has compiled anything: it would compile anew for a module whose dict of parameters is
    another one."""
    found = sys.modules.get("torch._dynamo.utils")
    return found is not None and bool(found.counters["stats"]["unique_graphs"])


def waiting(module: nn.Module, numbers: Mapping[int, int]) -> tuple[dict[int, list[nn.Module]], int]:
    """(for LateGather.begin, the number of the last bucket that has to come before anything runs, -1 for none).

    numbers: id of a parameter -> its bucket. At once is needed what is also held elsewhere than in a module's dict of
    parameters, where reading it would not be seen.
    """
    found: dict[int, list[nn.Module]] = {}
    first, seen, ahead = -1, set[nn.Module](), [module]
    # Anew in every step, since a user may have put another module in between.
    while ahead:
        part = ahead.pop()
        if part in seen:
            continue
        seen.add(part)
        ahead += [child for child in part._modules.values() if child is not None]
        own = part._parameters
        last = max([numbers.get(id(p), -1) for p in own.values()], default=-1)
        if last < 0:
            continue
        found.setdefault(last, []).append(part)
        if type(own) is not dict or isinstance(part, nn.RNNBase):
            first = max(first, last)
        for name in aliased(part):
            first = max(first, numbers.get(id(own.get(name)), -1))
    return found, first
