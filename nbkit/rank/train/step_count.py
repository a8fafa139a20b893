"""Measure the peak memory of one step on this rank, and the bytes that it sends.

On a device, the allocator reports the peak. On CPU ranks the step runs under a dispatch mode that sees every operation
and adds up the live storages. That takes microseconds for each operation, so only one step of a strategy is measured.
The growth of the process would be too much: it includes the analysis of the model, threads and caches.

The mode also says what uses the memory at the peak: `NamedBytes`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.forward_wrapper import in_backward
from nbkit.rank.parallel.proof.observe import tensors_in
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.telemetry.collectives import ring
from nbkit.rank.train.estimate.model_trace import LiveBytes
from nbkit.rank.train.out_of_memory.tensor_limit import held_by
from nbkit.records.readings import BACKUP, sent_bytes
from nbkit.records.records import MemoryPart

_PARTS_AT_MOST = 60
_LOSS = "loss"


@dataclass(frozen=True)
class Counts:
    """Bytes of a step on one rank, or on the ranks that hold and send most.

    peak: the peak memory. sent: see `records.readings.sent_bytes`. 0 means not known. named: the parts of this rank's
    peak; empty if only the sum is known.
    """

    peak: int = 0
    sent: int = 0
    named: tuple[MemoryPart, ...] = ()


@dataclass(frozen=True)
class _Label:
    kind: str
    module: str


class NamedBytes(LiveBytes):
    """Counts the bytes of live storages, and tells the kind and the module of those at the peak.

    A storage gets its label when an operation makes it. In a forward pass it is an activation of the running module. In
    a backward pass it is working memory of the module that the operands belong to. Working memory that a collective
    uses becomes a bucket. Parameters, gradients and optimizer state are looked up after forward and backward, and after
    the update (`look`).
    """

    def __init__(self, beside: Iterable[Tensor], names: Mapping[int, str], *, resized: bool) -> None:
        """names: id of a module -> its name."""
        self._log: list[tuple[int, int, int]] = []  # operations so far, number of the storage, change of its bytes
        self._labels: dict[int, _Label] = {}  # number of a storage -> label
        # Number of a storage -> {(offset, bytes) of a tensor in it: (label, bytes)}.
        self._owners: dict[int, dict[tuple[int, int], tuple[_Label, int]]] = {}
        self._numbers: dict[int, int] = {}
        self._names, self._stack = names, list[str]()
        self._label = _Label("buckets", "")  # for storages from before that `look` does not find: gradient buffers
        self.updates = False
        super().__init__(beside, resized=resized)

    def __enter__(self) -> NamedBytes:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._stack.append(self._names.get(id(module), ""))),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._label = self._made_now(args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in tensors_in((args, kwargs, out)):
                if (number := self._number_of(tensor)) is not None and self._labels[number].kind == "working":
                    self._labels[number] = _Label("buckets", self._labels[number].module)
        return out

    def _made_now(self, args: Any, kwargs: Any) -> _Label:
        named = next((name for name in reversed(self._stack) if name), "")
        if named:
            return _Label("activations", named)
        if not in_backward():
            return _Label("working", "update") if self.updates else _Label("activations", _LOSS)
        for tensor in tensors_in((args, kwargs)):
            number = self._number_of(tensor)
            if number is not None and (module := self._labels[number].module):
                return _Label("working", module)
        return _Label("working", _LOSS)

    def _number_of(self, tensor: Tensor) -> int | None:
        try:
            return self._numbers.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor subclass without its own memory
            return None

    def _changed(self, key: int, size: int) -> None:
        super()._changed(key, size)
        if key not in self._numbers:
            self._numbers[key] = number = len(self._labels)
            self._labels[number] = self._label
        self._log.append((len(self.levels), self._numbers[key], size))

    def _gone(self, key: int) -> None:
        super()._gone(key)
        self._numbers.pop(key, None)

    def look(self, owned: Iterable[tuple[str, str, Tensor]]) -> None:
        """Note the tensors that storages belong to. owned: (kind, module, tensor) of each."""
        for kind, module, tensor in owned:
            number = self._number_of(tensor)
            if number is None:
                continue
            parts = self._owners.setdefault(number, {})
            parts.setdefault((int(tensor.storage_offset()), tensor.nbytes), (_Label(kind, module), tensor.nbytes))

    def at_peak(self) -> dict[_Label, int]:
        """Return label -> bytes that were live at the peak."""
        if not self.levels:
            return {}
        last = self.levels.index(max(self.levels))
        sizes: dict[int, int] = defaultdict(int)
        for at, number, size in self._log:
            if at <= last:
                sizes[number] += size
        found: dict[_Label, int] = defaultdict(int)
        for number, size in sizes.items():
            left = size
            for label, own in self._owners.get(number, {}).values():
                own = min(own, left)
                found[label] += own
                left -= own
            # Storages without owners, and the padding of buffers.
            found[self._labels[number]] += left
        return {label: size for label, size in found.items() if size}


class StepCount:
    """Measures a running step. Run each part of the step in `part`, and call `done` at the end."""

    def __init__(
        self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, device: torch.device, *, memory: bool
    ) -> None:
        """memory: count memory on CPU ranks too. This does not work for a compiled model, which ignores the mode."""
        self._model, self._optimizer, self._device = sharded_model, optimizer, device
        self._watches = memory and not accelerator().holds(device)
        self._live: NamedBytes | None = None
        self._since = ring.end

    @contextmanager
    def part(self, *, update: bool = False) -> Iterator[None]:
        """Count memory inside. update: the body is the optimizer's step; otherwise forward and backward."""
        if not self._watches:
            yield
            return
        if self._live is None:
            # zero 3 resizes storages when it gathers and frees parameters.
            names = {id(part): starred(name) for name, part in self._model.module.named_modules()}
            held = held_by(self._model, self._optimizer)
            self._live = NamedBytes(held, names, resized=self._model.strategy.zero == 3)
        self._live.updates = update
        with self._live:
            yield
        self._live.look(self._owned())

    def _owned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, module, tensor) for the tensors of this rank between two steps."""
        held = self._model.held
        homes = {id(p): starred(name.rpartition(".")[0]) for name, p in held.items()}
        for name, p in held.items():
            yield "parameters", starred(name.rpartition(".")[0]), p
            if p.grad is not None:
                yield "gradients", starred(name.rpartition(".")[0]), p.grad
        for of, values in list(self._optimizer.state.items()):
            for value in values.values():
                if isinstance(value, Tensor):
                    yield "optimizer", homes.get(id(of), ""), value
        for name, buffer in self._model.module.named_buffers():
            yield "buffers", starred(name.rpartition(".")[0]), buffer
        # Under zero 3 the module's own parameters are temporary gathered parameters.
        kind = "buckets" if self._model.strategy.zero == 3 else "parameters"
        for name, p in self._model.module.named_parameters():
            if not isinstance(p, nn.Parameter) or id(p) in homes:
                continue
            yield kind, starred(name.rpartition(".")[0]), p
            if p.grad is not None:
                yield "gradients", starred(name.rpartition(".")[0]), p.grad

    def done(self) -> Counts:
        """Return the counts of the step."""
        calls, lost = ring.between(self._since, ring.end)
        own = (call for call in calls if call.axis != BACKUP)
        sent = sum(sent_bytes(call.op, call.bytes, len(call.group.members)) for call in own)
        if accelerator().holds(self._device):
            peak = accelerator().memory(self._device)[1]
        else:
            peak = self._live.peak if self._live is not None else 0
        named = parts_of(self._live.at_peak()) if self._live is not None else ()
        return Counts(peak, 0 if lost else round(sent), named)


def parts_of(found: Mapping[_Label, int]) -> tuple[MemoryPart, ...]:
    """Return the parts, the largest first. If there are many, merge the smallest into one part per kind."""
    parts = [MemoryPart(label.kind, label.module, size) for label, size in found.items()]
    parts.sort(key=lambda part: -part.bytes)
    rest: dict[str, int] = defaultdict(int)
    for part in parts[_PARTS_AT_MOST:]:
        rest[part.kind] += part.bytes
    return (*parts[:_PARTS_AT_MOST], *(MemoryPart(kind, "", size) for kind, size in rest.items()))


def starred(name: str) -> str:
    """Replace each number in a module's name by a star: "blocks.*.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
