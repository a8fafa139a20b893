"""Follow the data flow of a model while it runs once: which values depend on its parameters, and where they are used.

A run is divided at the entries of the blocks. Segment 0 lies before block 0, segment i + 1 begins with block i, and the
last one follows the last block. TorchDispatchMode sees every operation, and memory is tracked instead of Python
objects. At each entry, the tensors that depend on parameters are replaced by copies. A value from before that is used
afterwards and is not such a copy bypassed the cut, through a variable of the caller. Examples are the skip connections
of a U-Net and the output of the first of two towers.

The forward of a stage runs from its beginning, and the modules of earlier stages return zeros. If such a module returns
instead what an earlier stage has sent, everything that the caller computes from it without parameters is correct again.
So values that bypass a cut are sent from stage to stage as outputs of these modules (StageInput.skips), unless they
were made or changed in another way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from nbkit.rank.parallel.proof.observe import SHAPE_ONLY, Memory, memory_of, tensors_in, watched, written_by
from nbkit.rank.torch_private import pytree
from nbkit.rank.watching_mode import WatchingMode


class SkipConnection(NamedTuple):
    """The tensor at `path` in (output,) of a call of `module`. call: number of the call of this module, from 0."""

    module: str
    call: int
    path: str


_LOST = SkipConnection("", 0, "")
"""Marks a value that is not a module's output: the caller itself computed it from a parameter."""


@dataclass(frozen=True)
class StageInput:
    """The input of a block.

    carried: the tensors that depend on parameters, as paths into (args, kwargs). kept: path of a carried tensor that
    the caller passes to consecutive blocks -> its path in the arguments of the previous block. written: paths of
    carried tensors that are changed in place afterwards. skips: the values that bypass the cut.
    """

    carried: tuple[str, ...]
    kept: dict[str, str]
    written: frozenset[str]
    skips: tuple[SkipConnection, ...] = ()


class DataflowTrace(WatchingMode):
    """Follows one run of `module`. `blocks` are called once each, in this order ("" first: the run begins with it).

    skipped: modules whose outputs can be sent to a later stage. None of them contains another. uses: parameter name
    (its first name) -> the segments that use it. entries(): the input of each block. around: number of a block -> what
    bypasses the cut at its entry. opaque: names of the modules that return no tensor, or one that does not depend on
    parameters. callers: name -> segments that call the module.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str], skipped: Collection[str] = ()) -> None:
        super().__init__()
        self.module, self.blocks = module, list(blocks)
        self.segment = 1 if self.blocks[0] == "" else 0
        self._carried: list[list[str]] = [[] for _ in self.blocks]
        self._kept: list[dict[str, str]] = [{} for _ in self.blocks]
        self._written: list[set[str]] = [set() for _ in self.blocks]
        self._skips: list[dict[SkipConnection, str]] = [{} for _ in self.blocks]
        self._origins = _Origins(skipped)
        self.uses: dict[str, set[int]] = {name: set() for name, _ in module.named_parameters()}
        self.around: dict[int, str] = {}
        self.opaque: set[str] = set()
        self.callers: dict[str, set[int]] = {}
        self._names: dict[Memory, list[str]] = {}
        for name, param in module.named_parameters():
            self._names.setdefault(memory_of(param), []).append(name)
        self._born: dict[Memory, tuple[int, str]] = {}
        self._copies: dict[Memory, tuple[int, str, Memory]] = {}
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._alive: list[Tensor] = []
        self._inside: list[str] = []
        self._paused = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the output of `call`, which runs the module once."""
        with watched(self.module, self._enter, self._leave), self:
            output = call()
        for tensor in tensors_in(output):
            self._use(tensor, "the output of the model")
        for number, skips in enumerate(self._skips):
            if _LOST in skips or skips.keys() & self._origins.changed:
                self.around.setdefault(number, next(iter(skips.values())))
        return output

    def entries(self) -> list[StageInput]:
        """Return the input of each block."""
        seen = zip(self._carried, self._kept, self._written, self._skips, strict=True)
        return [
            StageInput(tuple(carried), kept, frozenset(written), tuple(sorted(skips)))
            for carried, kept, written, skips in seen
        ]

    def join(self, other: DataflowTrace) -> None:
        """Add the result of `other`, a run in another mode. A cut has to be correct in both."""
        for name, segments in other.uses.items():
            self.uses[name] |= segments
        for number, block in enumerate(self.blocks):
            if number in other.around:
                self.around.setdefault(number, f"in training, {other.around[number]}")
            elif number and self._crossing(number) != other._crossing(number):
                self.around.setdefault(number, f"{block} gets different inputs in training and in evaluation")
            self._written[number] |= other._written[number]
        self.opaque |= other.opaque
        for name, segments in other.callers.items():
            self.callers.setdefault(name, set()).update(segments)

    def _crossing(self, number: int) -> tuple[Any, ...]:
        return self._carried[number], self._kept[number], sorted(self._skips[number])

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inside.append(name)
        self._origins.enter(name)
        given = self._exchanged(self.blocks.index(name), args, kwargs) if name in self.blocks and name else None
        self.callers.setdefault(name, set()).add(self.segment)
        return given

    def _leave(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = tensors_in(output)
        if not found or not all(self._hangs(tensor) for tensor in found):
            self.opaque.add(name)
        self._inside.pop()
        self._origins.leave(name, output)
        if name and name == self.blocks[-1]:
            self.segment = len(self.blocks) + 1

    def _exchanged(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given: dict[int, tuple[str, Tensor]] = {}
        leaves: list[Any] = []
        flat, spec = pytree.tree_flatten_with_path((args, kwargs))
        self._alive, before = [], self._alive  # so that ids stay unique
        for key, leaf in flat:
            if isinstance(leaf, Tensor) and self._hangs(leaf):
                path = pytree.keystr(key)
                self._carried[number].append(path)
                if id(leaf) in self._given:
                    self._kept[number][path], source = self._given[id(leaf)]
                else:
                    self._use(leaf, f"the call of {self.blocks[number]}")
                    source = leaf
                given[id(leaf)] = (path, self._copy(source, number, path) if number else source)
                self._alive.append(leaf)
                leaf = given[id(leaf)][1]
            leaves.append(leaf)
        self._given, self.segment = given, number + 1
        for _, tensor in given.values() if number else ():
            self._born[memory_of(tensor)] = (self.segment, self.blocks[number])
        before.clear()
        changed: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
        return changed

    def _copy(self, source: Tensor, number: int, path: str) -> Tensor:
        self._paused = True
        copy = source.clone()
        self._paused = False
        self._copies[memory_of(copy)] = (number, path, memory_of(source))
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = [] if func.overloadpacket in SHAPE_ONLY else tensors_in((args, kwargs))
        hangs = [self._use(tensor, "") for tensor in given]
        result = func(*args, **kwargs)
        written = list(written_by(func, args, kwargs))
        for tensor in written:
            if (copied := self._copies.get(memory_of(tensor))) is not None:
                self._written[copied[0]].add(copied[1])
                self._origins.change(copied[2])
        if any(hangs):
            made = [t for t in (*tensors_in(result), *written) if memory_of(t) not in self._names]
            for tensor in made:
                self._born.setdefault(memory_of(tensor), (self.segment, self._inside[-1] if self._inside else ""))
            self._origins.combine((t for t, one in zip(given, hangs, strict=True) if one), made, written)
        return result

    def _hangs(self, tensor: Tensor) -> bool:
        """Return True if the tensor was computed from parameters.

        Views of a parameter do not count, because the stage that uses them holds the parameter.
        """
        return memory_of(tensor) in self._born

    def _use(self, tensor: Tensor, by: str) -> bool:
        """Note that `tensor` is used in this segment. Return True if results computed from it depend on parameters."""
        memory = memory_of(tensor)
        if memory in self._names:
            for name in self._names[memory]:
                self.uses[name].add(self.segment)
            return True
        if memory not in self._born:
            return False
        born, origin = self._born[memory]
        for number in range(max(born, 1), min(self.segment, len(self.blocks))):
            user = by or self._named(self._inside[-1] if self._inside else "")
            why = f"{self._named(origin)} computes a value before it, and {user} uses this value after it"
            for skip in sorted(self._origins.of(memory)):
                self._skips[number].setdefault(skip, why)
        return True

    def _named(self, name: str) -> str:
        return name or f"{type(self.module).__name__}.forward"


class _Origins:
    """The module outputs from which each value was computed, by operations between calls of `modules`.

    A later stage repeats these operations. changed: module outputs that were changed in place later. They can neither
    be sent nor computed again.
    """

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = frozenset(modules)
        self.changed: set[SkipConnection] = set()
        self._calls: Counter[str] = Counter()
        self._made: dict[Memory, frozenset[SkipConnection]] = {}
        self._within = 0

    def enter(self, module: str) -> None:
        """Note that a module is called."""
        self._within += module in self.modules

    def leave(self, module: str, output: Any) -> None:
        """Note that the module has returned `output`."""
        if module not in self.modules:
            return
        self._within -= 1
        call = self._calls[module]
        self._calls[module] += 1
        flat = pytree.tree_flatten_with_path((output,))[0]
        given = {
            id(leaf): SkipConnection(module, call, pytree.keystr(key)) for key, leaf in flat if isinstance(leaf, Tensor)
        }
        for tensor in tensors_in(output):
            # If it returns an argument, both origins are needed.
            self._add(tensor, {given.get(id(tensor), _LOST)})

    def combine(self, sources: Iterable[Tensor], results: Iterable[Tensor], written: Collection[Tensor]) -> None:
        """Note that an operation computed `results` from `sources` that depend on parameters, and changed `written`."""
        for tensor in written:
            self.change(memory_of(tensor))
        if not self._within:
            found = frozenset[SkipConnection]().union(*(self.of(memory_of(tensor)) for tensor in sources))
            for tensor in results:
                self._add(tensor, found)

    def change(self, memory: Memory) -> None:
        """Note that the value at `memory` is changed in place."""
        self.changed |= self._made.get(memory, frozenset())

    def of(self, memory: Memory) -> frozenset[SkipConnection]:
        """Return the module outputs from which the value at `memory` was computed."""
        return self._made.get(memory, frozenset({_LOST}))

    def _add(self, tensor: Tensor, skips: Collection[SkipConnection]) -> None:
        memory = memory_of(tensor)
        self._made[memory] = self._made.get(memory, frozenset()).union(skips)
