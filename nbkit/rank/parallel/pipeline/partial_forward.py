"""Run a part of a model inside the user's own forward. Gates at its modules skip modules, exchange values, and stop the
forward.

A stage with the blocks `lo` to `hi` of a chain calls the whole model on the real input. Until block `lo` is called,
modules with parameters are skipped. They return zeros of the right shapes, or their outputs as sent by the previous
stage (StageInput.skips). The input of block `lo` is replaced by the values that the previous stage has sent. The call
of block `hi` ends the forward, and its input is sent to the next stage. Masks, position ids and rotary tables depend on
no parameter. Every stage computes them itself.

A gate is the outermost wrapper of its module, so that hooks (of other strategies, of the user) run only if the module
does. It is stored in the module itself, in the attribute for a compiled call. The class does not change.

Tensors in the arguments of a call have paths in the notation of torch's pytrees: "[0][0]", "[1]['mask']", "[0][2].x".
The code here reads and writes them itself, because flattening all arguments by name takes tens of microseconds in every
step.
"""

from __future__ import annotations

import copy
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nbkit.errors import StrategyError
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.copies import copied, marked
from nbkit.rank.parallel.pipeline.trace_dataflow import SkipConnection, StageInput
from nbkit.rank.parallel.proof.unchanged import plain_attention
from nbkit.rank.parallel.tensor.sharded_tensor import completed, sendable
from nbkit.rank.torch_private import no_function_modes, pytree

_STEP = re.compile(r"\[([^\]]*)\]|\.(\w+)")


@lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[tuple[bool, Any], ...]:
    """Return (whether it is an attribute, the index, key or name) of each step of the path."""
    return tuple((not key, literal_eval(key) if key else name) for key, name in _STEP.findall(path))


def look(tree: Any, path: str) -> Any:
    """Return the value at `path`; None if there is none."""
    try:
        for is_attribute, key in _steps(path):
            tree = getattr(tree, key) if is_attribute else tree[key]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return tree


def put(tree: Any, path: str, value: Any) -> Any:
    """Return `tree` with `value` at `path`. Containers along the path are copied, not changed."""
    return _put(tree, _steps(path), value)


def _put(tree: Any, steps: tuple[tuple[bool, Any], ...], value: Any) -> Any:
    if not steps:
        return value
    (is_attribute, key), *rest = steps
    inner = _put(getattr(tree, key) if is_attribute else tree[key], tuple(rest), value)
    if isinstance(tree, tuple):
        at = tree._fields.index(key) if is_attribute else key  # type: ignore[attr-defined]
        parts = (*tree[:at], inner, *tree[at + 1 :])
        return parts if type(tree) is tuple else type(tree)(*parts)
    changed = copy.copy(tree)
    if is_attribute and not isinstance(tree, Mapping):
        setattr(changed, key, inner)
    else:
        changed[key] = inner
    return changed


class _Reached(BaseException):
    """Ends a forward at a block of another stage. It is a BaseException, so `except Exception` does not catch it."""


class StageBoundaries:
    """Boundaries at every block of a chain and at every module that may be skipped.

    blocks, entries: of the chain, one per block. The first block has no gate of its own. skipped: names of modules.
    again: True if the model calls its blocks again in the backward pass, with the arguments of the forward pass. team:
    the ranks of the tensor axis, each of which sends its positions to the next stage; None if positions are not split.
    """

    team: dist.ProcessGroup | None = None

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[str],
        entries: Sequence[StageInput],
        skipped: Sequence[str],
        *,
        again: bool = False,
    ) -> None:
        self._remembered: MutableMapping[Tensor, dict[str, Tensor]] | None = (
            WeakTensorKeyDictionary() if again else None
        )
        self.blocks, self.entries = tuple(blocks), tuple(entries)
        self._gated: list[tuple[nn.Module, Any]] = []
        self._lo = self._hi = self._at = 0
        self._running = False
        self._received: tuple[Tensor, ...] = ()
        self._sent: tuple[Tensor, ...] | None = None
        self._given: dict[str, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._skips: dict[SkipConnection, Tensor] = {}
        self._followed: dict[tuple[str, int], list[SkipConnection]] = {}
        for skip in dict.fromkeys(skip for entry in entries for skip in entry.skips):
            self._followed.setdefault((skip.module, skip.call), []).append(skip)
        numbers = {name: i for i, name in enumerate(blocks) if i}
        zeros = _Zeros()
        for name in dict.fromkeys([*numbers, *skipped]):
            part = module.get_submodule(name)
            shapes = _Shapes(part, zeros) if name in skipped else None
            compiled = part._compiled_call_impl
            self._gated.append((part, compiled))
            proceed = part._call_impl if compiled is None else compiled
            part._compiled_call_impl = partial(self._pass_by, name, numbers.get(name), shapes, proceed)

    def remove(self) -> None:
        """Restore the modules as they were."""
        for part, compiled in self._gated:
            part._compiled_call_impl = compiled
        self._gated.clear()

    def run(self, lo: int, hi: int, received: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """Run blocks lo to hi - 1 in `call()`, which calls the whole model. Return the tensors for block hi, or the
        output.

        Raises StrategyError if the model's forward does not reach the blocks at which the part begins and ends.
        """
        self._lo, self._hi, self._at = lo, hi, 0
        carried = len(self.entries[lo].carried) if lo else 0
        self._received, self._sent, self._given, self._running = tuple(received[:carried]), None, {}, True
        self._calls.clear()
        self._skips = dict(zip(self.entries[lo].skips, received[carried:], strict=True)) if lo else {}
        try:
            with plain_attention():
                output = call()
        except _Reached:
            return self._sent
        finally:
            self._running, self._received, self._sent, self._given, self._skips = False, (), None, {}, {}
        if self._at < min(hi, len(self.blocks) - 1):
            raise self._missed(self._at + 1)
        return output

    def idle(self) -> bool:
        """Return True if the forward has not reached its first block yet. Results from weights are unused until
        then."""
        return self._running and self._at < self._lo

    def _pass_by(
        self, name: str, number: int | None, shapes: _Shapes | None, proceed: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Handle the call of a module with a gate: skip it, change its input, or end the forward.

        number: number of the block, or None for other modules. shapes: None for a module that is never skipped.
        """
        if not self._running:
            if number is not None and (again := self._again(number, args, kwargs)) is not None:
                return proceed(*again[0], **again[1])
            if number is not None:
                raise StrategyError(
                    f"{self.blocks[number]} was called outside of the forward pass of its stage.",
                    numbers="by a call of trainer.model, or by the model's own activation checkpointing",
                    hint="trainer.evaluate(data), or another strategy; instead of the model's own checkpointing: "
                    "compute=nbkit.Compute(recompute=True)",
                )
            return proceed(*args, **kwargs)
        if number is not None:
            if number != self._at + 1:
                raise self._missed(self._at + 1)
            self._at = number
        if number == self._hi:
            arrived, entry = self._arrived(number, args, kwargs), self.entries[number]
            sent = [*(arrived[path] for path in entry.carried), *(self._skips[skip] for skip in entry.skips)]
            self._sent = tuple(map(sendable, sent))
            raise _Reached
        idle = self._at < self._lo
        if idle and shapes is not None:
            output = shapes.zeros(args, kwargs)
        else:
            if number is not None and not idle:
                args, kwargs = self._exchange(number, args, kwargs)
            output = proceed(*args, **kwargs)
        return self._around(name, output) if self._followed else output

    def _around(self, name: str, output: Any) -> Any:
        """Return the output of a call, with the values from the previous stage. Store what later stages need."""
        call = self._calls[name]
        self._calls[name] += 1
        for skip in self._followed.get((name, call), ()):
            own = look((output,), skip.path)
            if (received := self._skips.get(skip)) is not None:
                own = completed(received, own.shape, self.team)
                (output,) = put((output,), skip.path, own)
            self._skips[skip] = own
        return output

    def _missed(self, number: int) -> StrategyError:
        name = self.blocks[number] if number < len(self.blocks) else "the end"
        return StrategyError(
            f"The forward pass did not call {name} next, although it did when nbkit made the stages.",
            numbers=f"the last block called was {self.blocks[self._at] or 'none'}",
            hint="hints=nbkit.ModelHints(stages=[...]) with modules that every forward calls once, in training "
            "and in evaluation",
        )

    def _exchange(self, number: int, args: Any, kwargs: Any) -> Any:
        """Return (args, kwargs) with received values instead of the caller's values, which are placeholders."""
        entry = self.entries[number]
        arrived = self._arrived(number, args, kwargs)
        changed = entry.kept
        if number == self._lo:
            changed = dict.fromkeys(entry.carried, "")
            for path, tensor in zip(entry.carried, self._received, strict=True):
                # A received tensor is a leaf of autograd, which must not be changed in place.
                own = tensor.clone() if path in entry.written else tensor
                arrived[path] = completed(own, arrived[path].shape, self.team)
        self._given = arrived
        if self._remembered is not None:
            # The key is the caller's tensor, which its checkpoint keeps until the backward pass.
            caller = {path: look((args, kwargs), path) for path in entry.carried}
            others = {path: arrived[path] for path in changed if arrived[path] is not caller[path]}
            self._remembered[caller[entry.carried[0]]] = others
        for path in changed:
            args, kwargs = put((args, kwargs), path, arrived[path])
        return args, kwargs

    def _again(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return (args, kwargs) of a recomputed block, exchanged as in the forward pass, or None."""
        first = look((args, kwargs), self.entries[number].carried[0])
        if self._remembered is None or not isinstance(first, Tensor) or first not in self._remembered:
            return None
        for path, tensor in self._remembered[first].items():
            args, kwargs = put((args, kwargs), path, tensor)
        return args, kwargs

    def _arrived(self, number: int, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """Return the inputs of a block by path. Take a tensor shared with the previous block from that block's
        input."""
        entry = self.entries[number]
        arrived = {path: look((args, kwargs), path) for path in entry.carried}
        if missing := [path for path, leaf in arrived.items() if not isinstance(leaf, Tensor)]:
            raise StrategyError(
                f"{self.blocks[number]} was called with other arguments than when nbkit made the stages.",
                numbers=f"no tensor at {', '.join(missing)} of (args, kwargs)",
                hint="call the model in the same way each time, or hints=nbkit.ModelHints(stages=[...]) with "
                "other modules",
            )
        return arrived | {path: self._given[at] for path, at in entry.kept.items() if at in self._given}


class _Zeros:
    """Zeros that all skipped modules of a stage return. New zeros for each call would take longer than the call."""

    _AT_MOST = 4  # shapes whose memory is kept

    def __init__(self) -> None:
        self._kept: dict[Any, Tensor] = {}

    def like(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the same memory for the same shape, until something has written to it."""
        if torch.is_inference_mode_enabled():  # which does not count writes
            return torch.zeros(shape, dtype=dtype, device=device)
        found = self._kept.get((shape, dtype))
        if found is None or found._version:
            self._kept.pop((shape, dtype), None)
            if len(self._kept) == self._AT_MOST:
                self._kept.clear()
            found = self._kept[shape, dtype] = torch.zeros(shape, dtype=dtype, device=device)
        return found.detach()


class _Shapes:
    """Finds the shapes of a module's outputs with a twin on the meta device, once for each shape of its arguments.

    Modules that read values (which tokens an expert gets) do not run on meta. For them, a twin whose weights are
    expanded zeros runs on the real arguments. On the CPU only the second twin is used, because the first operation on
    meta imports torch's compiler, which takes seconds.
    """

    def __init__(self, module: nn.Module, zeros: _Zeros) -> None:
        self.device, self.filled = next(module.parameters()).device, zeros
        self.twin: nn.Module | None = None
        blank = {id(p): _blank(p) for p in module.parameters()}
        if accelerator().holds(self.device):
            memo = {id(t): _on_meta(t) for part in module.modules() for t in _own_tensors(part)}
            self.twin = copied(module, memo).eval()
            self.valued = copied(module, {id(b): b for b in module.buffers()} | blank).eval()
        else:
            self.valued = copied(module, {id(b): b.clone() for b in module.buffers()} | blank).eval()
        self.known: dict[Any, tuple[list[Any], Any]] = {}

    def zeros(self, args: Any, kwargs: Any) -> Any:
        """Return the output, all zeros. If the shapes are known, the twin does not run."""
        key = (_kind(args), _kind(kwargs) if kwargs else ())
        if key not in self.known:
            self.known[key] = pytree.tree_flatten(self._run(args, kwargs))
        outputs, spec = self.known[key]
        blank = [self.filled.like(o.shape, o.dtype, self.device) if isinstance(o, Tensor) else o for o in outputs]
        return blank[0] if spec.is_leaf() else pytree.tree_unflatten(blank, spec)

    def _run(self, args: Any, kwargs: Any) -> Any:
        on_meta = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        with _no_modes(), torch.no_grad():
            if self.twin is not None:
                with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
                    return self.twin(*on_meta[0], **on_meta[1])
            try:
                return self.valued(*args, **kwargs)
            except RuntimeError:  # torch's grouped product, for experts, does not accept expanded weights
                weights = {
                    name: torch.zeros_like(p, memory_format=torch.contiguous_format)
                    for name, p in self.valued.named_parameters()
                }
                return torch.func.functional_call(self.valued, weights, args, kwargs)


def _own_tensors(part: nn.Module) -> Iterator[Tensor]:
    for holder in (part._parameters, part._buffers, vars(part)):
        yield from (t for t in holder.values() if isinstance(t, Tensor))


def _on_meta(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return marked(nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare, tensor)


def _blank(param: nn.Parameter) -> nn.Parameter:
    blank = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
    return marked(nn.Parameter(blank, requires_grad=False), param)


def _kind(value: Any) -> Any:
    """Return a hashable value that determines the shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_kind(part) for part in value])
    if isinstance(value, dict):
        return tuple([(key, _kind(part)) for key, part in value.items()])
    return value if isinstance(value, int | float | str | None) else type(value)


@contextmanager
def _no_modes() -> Iterator[None]:
    """Disable function modes (keyed dropout, context parallel). They change values, not shapes."""
    with no_function_modes():
        yield
