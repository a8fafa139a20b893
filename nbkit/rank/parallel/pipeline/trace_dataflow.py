"""What flows through a model while it runs once: which values hang on its parameters, and who uses them where.

A run is divided at the entries of the blocks: segment 0 lies before block 0, segment i + 1 begins with block i, and the
last one follows the last block. Every operation is seen (TorchDispatchMode), and memory is followed instead of Python
objects. At each entry the tensors that hang on parameters are exchanged for copies. What is used afterwards and is no
such copy went around the cut, through a variable of the caller: a stage that begins there would not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SHAPE_ONLY", "Entry", "Flow", "tensors_in", "written_by"]

SHAPE_ONLY = {
    getattr(torch.ops.aten, name)
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
    )
}
"""Operations that ask a tensor for its shape, dtype or device, and read none of its values."""


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
        self._names: dict[StorageWeakRef, list[str]] = {}
        for name, param in module.named_parameters():
            self._names.setdefault(_memory(param), []).append(name)
        self._born: dict[StorageWeakRef, tuple[int, str]] = {}
        self._copies: dict[StorageWeakRef, tuple[int, str]] = {}
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._alive: list[Tensor] = []
        self._inside: list[str] = []
        self._paused = False

    def run(self, call: Callable[[], Any]) -> Any:
        """The output of `call`, which runs the module once."""
        with ExitStack() as hooks:
            for name, part in self.module.named_modules():
                for handle in self._watch(name, part):
                    hooks.callback(handle.remove)
            with self:
                output = call()
        for tensor in tensors_in(output):
            self._use(tensor, "the output of the model")
        return output

    def entries(self) -> list[Entry]:
        """What goes into each block."""
        seen = zip(self._carried, self._kept, self._written, strict=True)
        return [Entry(tuple(carried), kept, frozenset(written)) for carried, kept, written in seen]

    def _watch(self, name: str, part: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self._inside.append(name)
            given = self._enter(self.blocks.index(name), args, kwargs) if name in self.blocks and name else None
            self.callers.setdefault(name, set()).add(self.segment)
            return given

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            found = tensors_in(output)
            if not found or not all(self._hangs(tensor) for tensor in found):
                self.opaque.add(name)
            self._inside.pop()
            if name and name == self.blocks[-1]:
                self.segment = len(self.blocks) + 1

        yield part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield part.register_forward_hook(leave)

    def _enter(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
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
            self._born[_memory(tensor)] = (self.segment, self.blocks[number])
        before.clear()
        changed: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
        return changed

    def _copy(self, source: Tensor, number: int, path: str) -> Tensor:
        self._paused = True
        copy = source.clone()
        self._paused = False
        self._copies[_memory(copy)] = (number, path)
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
            if (copied := self._copies.get(_memory(tensor))) is not None:
                self._written[copied[0]].add(copied[1])
        if any(hangs):
            for tensor in (*tensors_in(result), *written):
                if (memory := _memory(tensor)) not in self._names:
                    self._born.setdefault(memory, (self.segment, self._inside[-1] if self._inside else ""))
        return result

    def _hangs(self, tensor: Tensor) -> bool:
        """Whether it was computed from parameters. Views of a parameter are not: who uses them holds that one."""
        return _memory(tensor) in self._born

    def _use(self, tensor: Tensor, by: str) -> bool:
        """Note that `tensor` is used in this segment; whether what comes of it hangs on parameters."""
        memory = _memory(tensor)
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


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tree, of output objects and of plain objects that hold some."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [part for part in pytree.tree_leaves(vars(leaf)) if isinstance(part, Tensor)]
    return found


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Stands for the memory behind a tensor; while it is kept, no other memory equals it."""
    return StorageWeakRef(tensor.untyped_storage())


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            yield from tensors_in(value)
