"""Follows what flows through a model while it runs once: which values hang on its parameters, and who uses them where.

A run is divided at the entries of the blocks: segment 0 lies before block 0, segment i + 1 begins with block i, and the
last one follows the last block. Every operation is seen (TorchDispatchMode), and memory is followed instead of Python
objects. At each entry the tensors that hang on parameters are exchanged for copies. What is used afterwards and is no
such copy went around the cut, through a variable of the caller: a stage that begins there would not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nbkit.rank.parallel.proof.calls import watched
from nbkit.rank.parallel.proof.memory import SHAPE_ONLY, Memory, memory_of, tensors_in, written_by


@dataclass(frozen=True)
class Entry:
    """What goes into a block. carried: where a tensor hangs on parameters, as a path into (args, kwargs).

    kept: of these, the ones that the caller gives to consecutive blocks again -> where the block before got it.
    written: of these, the ones that are changed in place afterwards.
    """

    carried: tuple[str, ...]
    kept: dict[str, str]
    written: frozenset[str]


class Flow(TorchDispatchMode):
    """Follows one run of `module`; `blocks` are called once each, in this order ("" first: the run begins with it).

    uses: parameter name (each one's first) -> the segments that use it. entries(): what goes into each block.
    around: number of a block -> who goes around the cut at its entry. opaque: names of the modules that give out a
    value that does not hang on parameters, or none at all. callers: name -> segments that call the module.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.module, self.blocks = module, list(blocks)
        self.segment = 1 if self.blocks[0] == "" else 0
        self._carried: list[list[str]] = [[] for _ in self.blocks]
        self._kept: list[dict[str, str]] = [{} for _ in self.blocks]
        self._written: list[set[str]] = [set() for _ in self.blocks]
        self.uses: dict[str, set[int]] = {name: set() for name, _ in module.named_parameters()}
        self.around: dict[int, str] = {}
        self.opaque: set[str] = set()
        self.callers: dict[str, set[int]] = {}
        self._names: dict[Memory, list[str]] = {}
        for name, param in module.named_parameters():
            self._names.setdefault(memory_of(param), []).append(name)
        self._born: dict[Memory, tuple[int, str]] = {}
        self._copies: dict[Memory, tuple[int, str]] = {}
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._alive: list[Tensor] = []
        self._inside: list[str] = []
        self._paused = False

    def run(self, call: Callable[[], Any]) -> Any:
        """The output of `call`, which runs the module once."""
        with watched(self.module, self._enter, self._leave), self:
            output = call()
        for tensor in tensors_in(output):
            self._use(tensor, "the output of the model")
        return output

    def entries(self) -> list[Entry]:
        """What goes into each block."""
        seen = zip(self._carried, self._kept, self._written, strict=True)
        return [Entry(tuple(carried), kept, frozenset(written)) for carried, kept, written in seen]

    def join(self, other: Flow) -> None:
        """What `other`, a run in another mode, has shown holds as well: a cut has to be right in both."""
        for name, segments in other.uses.items():
            self.uses[name] |= segments
        for number, block in enumerate(self.blocks):
            if number and (self._carried[number], self._kept[number]) != (other._carried[number], other._kept[number]):
                self.around.setdefault(number, f"what goes into {block} in training is not what does in evaluation")
            if number in other.around:
                self.around.setdefault(number, f"in training, {other.around[number]}")
            self._written[number] |= other._written[number]
        self.opaque |= other.opaque
        for name, segments in other.callers.items():
            self.callers.setdefault(name, set()).update(segments)

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._inside.append(name)
        given = self._exchanged(self.blocks.index(name), args, kwargs) if name in self.blocks and name else None
        self.callers.setdefault(name, set()).add(self.segment)
        return given

    def _leave(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = tensors_in(output)
        if not found or not all(self._hangs(tensor) for tensor in found):
            self.opaque.add(name)
        self._inside.pop()
        if name and name == self.blocks[-1]:
            self.segment = len(self.blocks) + 1

    def _exchanged(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given: dict[int, tuple[str, Tensor]] = {}
        leaves: list[Any] = []
        flat, spec = pytree.tree_flatten_with_path((args, kwargs))
        self._alive, before = [], self._alive  # so that an id stands for one tensor
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
        self._copies[memory_of(copy)] = (number, path)
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
        if any(hangs):
            for tensor in (*tensors_in(result), *written):
                if (memory := memory_of(tensor)) not in self._names:
                    self._born.setdefault(memory, (self.segment, self._inside[-1] if self._inside else ""))
        return result

    def _hangs(self, tensor: Tensor) -> bool:
        """Whether it was computed from parameters. Views of a parameter are not: who uses them holds that one."""
        return memory_of(tensor) in self._born

    def _use(self, tensor: Tensor, by: str) -> bool:
        """Note that `tensor` is used in this segment; whether what comes of it hangs on parameters."""
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
            self.around.setdefault(number, f"what {self._named(origin)} computes before it is used after it, by {user}")
        return True

    def _named(self, name: str) -> str:
        return name or f"{type(self.module).__name__}.forward"
