"""Builds a model without memory for its large weights. Each rank later makes the weights that it holds, one at a time.

The user's callable runs once, under a mode. Its large tensors are made on the meta device, where they have a shape but
no memory. The mode records every operation on such a tensor. If an operation draws random numbers, the mode first
records the state of the generator. Then it draws them into memory that it frees at once, so that the generator advances
as usual.

Later `Recording.read` makes one tensor. It runs again the operations that produced this tensor, and each draw starts
from its recorded state. A plain build runs the same operations on the same values. So the weights equal those of a
plain build, bit for bit, under every strategy and for any initialisation.

Some callables cannot be recorded. They raise an error on meta tensors, pass a weight to code outside of torch, or keep
a tensor that the search over modules does not find. Then the model is built whole on every rank, and a warning says
why.

The idea to record operations and run them later comes from `deferred_init` of torchdistX (Meta, 2022). That project
makes all draws together, in order. Here the recorded states allow each weight to be made separately.
"""

from __future__ import annotations

import gc
import math
import mmap
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.models.pretrained import WeightlessModel
from nbkit.rank.parallel.module.copies import (
    drop_gradient,
    homes,
    marked,
    note_aliases,
    parameter_like,
    put_in_place,
    replace_submodule,
    tensors_beside,
    window,
)
from nbkit.rank.parallel.reshard.load_local_shards import copy_part
from nbkit.rank.rng.host_generators import Drawn
from nbkit.rank.rng.seeding import build, seeded
from nbkit.rank.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from nbkit.rank.watching_mode import WatchingMode
from nbkit.tensor_layout import Layout

_LARGE = 1 << 18
"""Tensors of at least this many bytes are recorded. Smaller ones are made as usual, because code often reads them."""

_WORTH_SAYING = 1 << 28
"""If a model of at least this many bytes is built whole, a warning says so."""

_FILLS = {"uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}
_OVERWRITES = _FILLS | {"fill_", "zero_", "copy_"}
_IS_META: Any = torch.Tensor.is_meta
_DEVICE: Any = torch.Tensor.device
_REPLACE_MEMORY = {"set_", "resize_", "resize_as_", "_resize_output_"}


_hides: ContextVar[bool] = ContextVar("hides", default=False)


@contextmanager
def _said_to_be_on_cpu() -> Iterator[None]:
    """Make meta tensors report the CPU as their device, in this thread.

    Code that initialises weights may skip meta tensors, as torch.nn.init.trunc_normal_ does.
    """
    kind: Any = torch.Tensor
    kind.is_meta = property(lambda tensor: _IS_META.__get__(tensor) and not _hides.get())
    kind.device = property(lambda tensor: _told(_DEVICE.__get__(tensor)))
    token = _hides.set(True)
    try:
        yield
    finally:
        _hides.reset(token)
        del kind.is_meta, kind.device


def _told(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" and _hides.get() else device


class NotRecorded(Exception):
    """A callable cannot be recorded. The text tells the user why."""


@dataclass(frozen=True)
class _View:
    """A recorded tensor, as a view of the memory named `key`."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Given:
    """A large real tensor that an operation read. It is not copied. Its version shows whether it changed later."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    """A recorded call.

    made: memory that the call made -> (number of the output, its view). overwrites: memory that the call fills without
    reading it. state: the state of torch's generator before the call, if the call draws; else None.
    """

    func: Any
    leaves: list[Any]
    spec: Any
    made: Mapping[int, tuple[int, _View]]
    overwrites: frozenset[int]
    state: Tensor | None

    def describe(self, names: dict[int, int]) -> str:
        """Return a text that is equal for equal calls. names: memory -> its number, in order of appearance."""
        words = [str(self.func), f"{zlib.crc32(self.state.numpy().tobytes())}" if self.state is not None else ""]
        for leaf in self.leaves:
            if isinstance(leaf, _View):
                number = names.setdefault(leaf.key, len(names))
                words.append(f"{number} {leaf.dtype} {leaf.size} {leaf.stride} {leaf.offset}")
            elif isinstance(leaf, Tensor | _Given):
                raw = (leaf.tensor if isinstance(leaf, _Given) else leaf).detach().contiguous().reshape(-1)
                words.append(f"{raw.dtype} {zlib.crc32(raw.view(torch.uint8).numpy().tobytes())}")
            elif isinstance(leaf, torch.Generator):
                words.append(f"{zlib.crc32(leaf.get_state().numpy().tobytes())}")
            else:
                words.append(repr(leaf))
        for key in self.made:
            names.setdefault(key, len(names))
        return " ".join(words)


class Recording(WatchingMode):
    """The operations on the large tensors that were made inside this mode."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._memories: dict[int, StorageWeakRef] = {}  # the references also prevent that an address is used again
        self._bytes: dict[int, int] = {}

    # --- While the callable runs --------------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        self._stack = ExitStack()
        self._stack.enter_context(_said_to_be_on_cpu())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        token = _hides.set(False)
        try:
            return self._seen(func, args, kwargs or {})
        finally:
            _hides.reset(token)

    def _seen(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return self._compute(func, leaves, spec)
        device = torch.device(kwargs.get("device") or "cpu")
        if tensors or device.type not in ("cpu", "meta") or "device" not in _arguments(func):
            return func(*args, **kwargs)
        least = _LARGE if device.type == "cpu" else 0
        if _draws(func):
            before = self._before(leaves)
            made = func(*args, **{**kwargs, "device": "cpu"})
            if made.nbytes < least:
                return made
            return self._record(func, *before, spec, (), _on_meta(made))
        made = func(*args, **{**kwargs, "device": "meta"})
        if not isinstance(made, Tensor) or made.nbytes < least:
            return func(*args, **kwargs)
        return self._record(func, leaves, None, spec, (), made)

    def _compute(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Record a call that takes recorded tensors. Returns its outputs on the meta device."""
        name = _name(func)
        if name in _REPLACE_MEMORY:
            raise NotRecorded(f"it calls {name} on a weight")
        changed = _changed(func, leaves, spec)
        if any(not each.is_meta for each in changed) or not all(_is_tensor(one.type) for one in func._schema.returns):
            return self._called(func, leaves, spec)
        before: tuple[list[Any], Tensor | None] = [self._noted(leaf) for leaf in leaves], None
        if _draws(func):
            before = self._before(leaves)
        if _draws(func):
            given = list(leaves)
            if name in _FILLS:
                view = self.view(leaves[0])
                size = 1 + sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True) if n)
                given[0] = replace(view, offset=0).on(_memory(size * view.dtype.itemsize))
            made = tree_map_only(Tensor, _on_meta, self._called(func, given, spec))
            return self._record(func, *before, spec, changed, changed[0] if changed else made)
        if name in _OVERWRITES:
            return self._record(func, *before, spec, changed, changed[0])
        args, kwargs = _on("meta", *tree_unflatten([_on_meta(leaf) for leaf in leaves], spec))
        try:
            made = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if changed:
                raise
            return self._called(func, leaves, spec)  # the shape of the output depends on values
        return self._record(func, *before, spec, changed, made)

    def _before(self, leaves: list[Any]) -> tuple[list[Any], Tensor]:
        """Return the arguments of a call that draws, as they are recorded, and the state of torch's generator."""
        noted = [leaf.clone_state() if isinstance(leaf, torch.Generator) else self._noted(leaf) for leaf in leaves]
        return noted, torch.default_generator.get_state()

    def _record(
        self, func: Any, noted: list[Any], state: Tensor | None, spec: Any, changed: Sequence[Tensor], made: Any
    ) -> Any:
        fresh: dict[int, tuple[int, _View]] = {}
        for number, output in enumerate(tree_leaves(made)):
            if isinstance(output, Tensor) and (key := _key(output)) not in self._memories:
                self._memories[key] = StorageWeakRef(output.untyped_storage())
                self._bytes[key] = output.untyped_storage().nbytes()
                fresh[key] = number, self.view(output)
        overwrites = set(fresh)
        if _name(func) in _OVERWRITES and isinstance(first := noted[0], _View):
            if math.prod(first.size) * first.dtype.itemsize == self._bytes[first.key]:
                overwrites.add(first.key)
        if keys := {_key(each) for each in changed} | set(fresh):
            for key in keys:
                self._writers[key].append(len(self._operations))
            self._operations.append(_Operation(func, noted, spec, fresh, frozenset(overwrites), state))
        return made

    def _called(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Make the contents of the recorded tensors, and return the result of the call on them."""
        memo: dict[Any, torch.UntypedStorage] = {}
        real = [
            view.on(self._content(view.key, len(self._operations), memo))
            if isinstance(leaf, Tensor) and leaf.is_meta and (view := self.view(leaf))
            else leaf
            for leaf in leaves
        ]
        args, kwargs = _on("cpu", *tree_unflatten(real, spec))
        return func(*args, **kwargs)

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return self.view(leaf)
        if leaf.is_inference():
            raise NotRecorded("it computes in inference mode")
        return leaf.detach().clone() if leaf.nbytes < _LARGE else _Given(leaf, leaf._version)

    def view(self, tensor: Tensor) -> _View:
        """Return the recorded `tensor` as a view. Raises NotRecorded if it is not in this recording."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotRecorded("it makes a tensor that is not an array of its own")
        if (key := _key(tensor)) not in self._memories:
            raise NotRecorded("it holds a tensor on the meta device that was made elsewhere")
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _View(key, tensor.dtype, size, stride, int(tensor.storage_offset()))

    # --- Afterwards ---------------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Return True if a large tensor was made."""
        return bool(self._operations)

    def keep(self, views: Iterable[_View]) -> None:
        """Forget the operations that `views` do not depend on. From now on only `views` can be read."""
        needed, ahead = set[int](), [(view.key, len(self._operations)) for view in views]
        while ahead:
            key, before = ahead.pop()
            for number in self._since(key, before):
                if number not in needed:
                    needed.add(number)
                    views = (leaf for leaf in self._operations[number].leaves if isinstance(leaf, _View))
                    ahead += [(view.key, number) for view in views if view.key != key]
        self._operations = [
            one if i in needed else _Operation(one.func, [], None, {}, frozenset(one.overwrites), None)
            for i, one in enumerate(self._operations)
        ]

    def held_elsewhere(self) -> bool:
        """Return True if a recorded tensor still exists."""
        if all(memory.expired() for memory in self._memories.values()):
            return False
        gc.collect()
        return not all(memory.expired() for memory in self._memories.values())

    def digest(self) -> int:
        """Return a number that is equal on ranks whose weights are equal."""
        found, names = 0, dict[int, int]()
        for operation in self._operations:
            if operation.leaves:
                found = zlib.crc32(operation.describe(names).encode(), found)
        return found

    def read(self, view: _View) -> Tensor:
        """Return a new tensor with the content of `view`."""
        return view.on(self._content(view.key, len(self._operations), {}))

    def fill(self, source: _View, target: Tensor, layout: Layout) -> None:
        """Copy the part of `source` that `layout` names to `target`."""
        copy_part(target, layout, self.read(source))

    def _since(self, key: int, before: int) -> list[int]:
        """Return the numbers of the operations before `before` that made the content of `key`, the newest first."""
        found = []
        for number in reversed(self._writers[key]):
            if number < before:
                found.append(number)
                if key in self._operations[number].overwrites:
                    break
        return found

    def _content(self, key: int, before: int, memo: dict[Any, torch.UntypedStorage]) -> torch.UntypedStorage:
        """Return memory with the content of `key` before operation `before`. memo: contents that are only read."""
        memory = None
        for number in reversed(self._since(key, before)):
            memory = self._run(number, key, memory, memo)
        assert memory is not None
        return memory

    @torch.no_grad()
    def _run(
        self, number: int, key: int, memory: torch.UntypedStorage | None, memo: dict[Any, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """Run an operation again, and return the content of `key` after it. memory: the content before it."""
        operation = self._operations[number]
        leaves: list[Any] = []
        for leaf in operation.leaves:
            if isinstance(leaf, _View):
                if leaf.key == key:
                    memory = _memory(self._bytes[key]) if memory is None else memory
                    leaves.append(leaf.on(memory))
                    continue
                known = leaf.key, (self._since(leaf.key, number) or [-1])[0]
                if known not in memo:
                    memo[known] = self._content(leaf.key, number, memo)
                leaves.append(leaf.on(memo[known]))
            elif isinstance(leaf, _Given):
                if leaf.tensor._version != leaf.version:
                    raise NotRecorded("it changes a tensor after it has copied it into a weight")
                leaves.append(leaf.tensor)
            else:
                leaves.append(leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf)
        args, kwargs = _on("cpu", *tree_unflatten(leaves, operation.spec))
        if key in operation.made and "dtype" in _arguments(operation.func):
            kwargs["dtype"] = operation.made[key][1].dtype  # the default dtype may have changed
        before = torch.default_generator.get_state() if operation.state is not None else None
        try:
            if operation.state is not None:
                torch.default_generator.set_state(operation.state)
            output = operation.func(*args, **kwargs)
        finally:
            if before is not None:
                torch.default_generator.set_state(before)
        if key in operation.made:
            place, view = operation.made[key]
            tensor = tree_leaves(output)[place]
            if (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) != (view.size, view.stride, view.dtype):
                raise NotRecorded(f"{operation.func} makes a different tensor on the meta device")
            found: torch.UntypedStorage = tensor.untyped_storage()
            return found
        assert memory is not None
        return memory


def build_parts(
    model: Callable[[], nn.Module], *, seed: int, device: torch.device, world_size: int
) -> tuple[nn.Module, WeightlessModel | None]:
    """Return the module that `model` builds under `seed`, and the source of its large weights. Collective.

    The source is None if the module has all its weights. This is so if the module has no large weights, or if some rank
    cannot record `model`, which gives a warning for a large model. Raises the errors of `nbkit.rank.rng.seeding.build`.
    """
    made, why = _record(model, seed=seed, device=device)
    module = made if isinstance(made, nn.Module) else None
    weightless = made if isinstance(made, WeightlessModel) else None
    own = (why, weightless.source.digest() if weightless is not None else 0)  # type: ignore[attr-defined]
    everyone = all_gather_objects(own, world_size=world_size, device=device)
    if weightless is not None and len(set(everyone)) == 1:
        return build(weightless.module, seed=seed, device=device), weightless
    if module is not None and not any(digest for _, digest in everyone):
        return build(module, seed=seed, device=device), None
    module = build(model, seed=seed, device=device)
    size = sum(p.nbytes for p in module.parameters())
    reason = next((why for why, _ in everyone if why), "the ranks do not draw the same numbers")
    if size >= _WORTH_SAYING:
        warnings.warn(
            f"Every rank builds the whole model before nbkit splits it: {size / 1e9:.1f} GB each. {reason}",
            stacklevel=5,
        )
    return module, None


def without_memory(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a callable that builds the same model with large tensors on the meta device, to inspect its shapes.

    A model that cannot be built on the meta device is built with memory.
    """

    def build() -> nn.Module:
        try:
            with Recording():
                return model()
        except Exception:
            return model()

    return build


def _record(
    model: Callable[[], nn.Module], *, seed: int, device: torch.device
) -> tuple[WeightlessModel | nn.Module | None, str]:
    """Call `model` and return (module, "").

    The module lacks its large weights, if it has any. If `model` cannot be recorded, return (None, reason).
    """
    drawn, recording = Drawn.so_far(), Recording()
    try:
        with seeded(device):
            torch.manual_seed(seed)
            with recording:
                module = model()
            if not isinstance(module, nn.Module) or not recording.is_used:
                return module, ""
            return _without_weights(module, recording, device), ""
    except NotRecorded as error:
        why = str(error)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    drawn.restore()
    return None, why


@torch.no_grad()
def _without_weights(module: nn.Module, recording: Recording, device: torch.device) -> WeightlessModel:
    """Replace the meta tensors of `module`: buffers by real ones, parameters by windows of random numbers."""
    note_aliases(module)
    views: dict[str, _View] = {}
    draw = torch.Generator().manual_seed(0)
    params = {id(p) for p in module.parameters()}
    for name, places in homes(module).items():
        old: nn.Parameter | None = getattr(*places[0])
        if old is not None and old.is_meta:
            views[name] = recording.view(old)
            replace_submodule(places, new := parameter_like(window(old.shape, old.dtype, device, draw), old))
            if new.requires_grad:  # nbkit inspects the model by backward passes, and gradients are as large as weights
                new.register_post_accumulate_grad_hook(drop_gradient)
            for part, attribute in places:
                if isinstance(part, nn.RNNBase):
                    setattr(part, attribute, new)  # RNNBase updates its list of weights when an attribute is set
        old = None
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = marked(recording.read(recording.view(buffer)), buffer)
    for where, tensor in list(tensors_beside(module)):
        if tensor.is_meta and id(tensor) not in params:
            if not tensor.is_leaf:
                raise NotRecorded("it keeps a tensor that it computes from a weight")
            put_in_place(where, marked(recording.read(recording.view(tensor)), tensor))
    names = {name for name, _ in module.named_parameters()}
    buffer = where = tensor = None  # type: ignore[assignment]
    if recording.held_elsewhere():
        raise NotRecorded("something outside of its modules holds one of its tensors")
    recording.keep(views.values())
    added = {name: p.detach() for name, p in module.named_parameters() if name not in views}
    assert names == added.keys() | views.keys()
    return WeightlessModel(module, recording, views, added)


def _memory(num_bytes: int) -> torch.UntypedStorage:
    """Return memory that returns to the system when it is freed. The C library would keep freed memory."""
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8).untyped_storage()


def _key(tensor: Tensor) -> int:
    found: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return found


def _arguments(func: Any) -> set[str]:
    return {one.name for one in func._schema.arguments}


def _is_tensor(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _on_meta(leaf: Any) -> Any:
    """Return a meta tensor with the shape of `leaf`; return anything but a real tensor unchanged."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _on(device: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with `device` in place of the device that the call named, if it named one."""
    return args, {**kwargs, "device": device} if kwargs.get("device") is not None else kwargs


def _changed(func: Any, leaves: list[Any], spec: Any) -> list[Tensor]:
    """Return the tensors that the call changes in place."""
    args, kwargs = tree_unflatten(leaves, spec)
    found: list[Tensor] = []
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(one.name)
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found
