"""Prove that a block computes the same on parts of the positions as on all of them, in one process.

The parts run through the code that splits the block on ranks (`Spread` in context_parallel.py), with one thread per
rank, in double precision, and with random weights, because weights of a new model may be zero in important places. If
the results differ, the first call that differs is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.loss.mean_over_rows import coarsest
from nbkit.rank.parallel.context.attention import on_all, share_outside
from nbkit.rank.parallel.context.context_parallel import PositionMethod, Spread
from nbkit.rank.parallel.context.peers import Threads
from nbkit.rank.parallel.module import copies
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.proof.observe import gap, gradients, watched
from nbkit.rank.parallel.proof.unchanged import Draws, DroppingNothing
from nbkit.rank.parallel.tensor.collectives import together
from nbkit.rank.rng.keyed_dropout import redrawing
from nbkit.rank.rng.seeding import set_seed
from nbkit.rank.torch_private import tree_leaves, tree_map_only
from nbkit.tensor_layout import Parting, contiguous, count

_SEEN = 1e-7


def joined(whole: Tensor, parts: Sequence[Tensor], parting: Parting = contiguous) -> tuple[int | None, Tensor]:
    """Return (dim of positions, the parts joined along it).

    If every part has the shape of `whole`, return (None, their mean, which gives each part a share of the gradient).
    parting: which positions each part holds. Raises ValueError if the parts do not compose `whole`.
    """
    shapes = [part.shape for part in parts]
    if all(shape == whole.shape for shape in shapes):
        return None, torch.stack(list(parts)).mean(0) if whole.requires_grad else parts[0]
    for dim in range(whole.ndim):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes if len(shape) == whole.ndim}
        same = rest == {(*whole.shape[:dim], *whole.shape[dim + 1 :])}
        if not same or sum(shape[dim] for shape in shapes) != whole.shape[dim]:
            continue
        if parting is contiguous:
            return dim, torch.cat(list(parts), dim)
        total, size = whole.shape[dim], len(parts)
        if [shape[dim] for shape in shapes] == [count(parting(total, size, i)) for i in range(size)]:
            return dim, together(parts, dim, total, parting)
    raise ValueError(f"{tuple(whole.shape)} is not made up of {', '.join(str(tuple(shape)) for shape in shapes)}")


class CallTrace:
    """Records the results of all calls of torch functions while a block runs, in several threads."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._inside = threading.local()

    def around(self, forward: Callable[..., Any], log: Callable[[], list[Any]]) -> Callable[..., Any]:
        """Wrap `forward` so that it appends (call, path of the module, resulting tensors) to log()."""

        @wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._hooks(), _Recording(log(), self._path):
                return forward(*args, **kwargs)

        return traced

    def _path(self) -> str:
        stack = getattr(self._inside, "stack", [])
        return stack[-1] if stack else ""

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._inside.stack = []

        def enter(name: str, *_: Any) -> None:
            if name and threading.get_ident() == thread:
                self._inside.stack.append(name)

        def leave(name: str, *_: Any) -> None:
            if name and threading.get_ident() == thread and self._inside.stack:
                self._inside.stack.pop()

        with watched(self.block, enter, leave):
            yield


class _Recording(TorchFunctionMode):
    def __init__(self, log: list[Any], path: Callable[[], str]) -> None:
        super().__init__()
        self._log, self._path = log, path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path, result = self._path(), func(*args, **(kwargs or {}))
        tensors = [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors:
            self._log.append((getattr(func, "__name__", str(func)), path, tensors))
        return result


def first_difference(
    whole: Sequence[Any], parts: Sequence[Sequence[Any]], parting: Parting = contiguous
) -> tuple[str, str] | None:
    """Compare logs of a CallTrace. Return (call, path of its module) of the first call that differs, or None.

    A call differs if the parts do not make it, or if their results do not compose the whole. parting: which positions
    each part holds.
    """
    for i, (name, path, tensors) in enumerate(whole):
        if any(len(part) <= i for part in parts):
            return _spelled(name), path
        others = [part[i] for part in parts]
        if any(other[0] != name or len(other[2]) != len(tensors) for other in others):
            return _spelled(name), path
        for j, tensor in enumerate(tensors):
            given = [other[2][j] for other in others]
            try:
                rule, put = joined(tensor, given, parting)
            except ValueError:
                return _spelled(name), path
            if any(gap(tensor, each) > _SEEN for each in (given if rule is None else [put])):
                return _spelled(name), path
    return None


def _spelled(name: str) -> str:
    return "x[...]" if name == "__getitem__" else name.strip("_")


_EXACT, _ROUNDED = 1e-10, 1e-3
_NUDGE, _NOISE = 1e-11, 30
"""A difference below `_ROUNDED` may be rounding if it is at most `_NOISE` times the effect of a perturbation of the
input: by `_NUDGE`, or by the rounding inside the block, for example in a router that computes in float32."""

_MODULES, _LEAST = 5, 1 / 3
"""The number of attempts to run one more module on all positions, and the least part of matrix elements that must run
on parts."""

Rules = tuple[int | None, ...]
"""Dim of positions of each tensor that a block returns; None if every part returns it whole."""


@dataclass
class BlockCall:
    """A call of the block `name` on all positions: its arguments, and its output before any hook."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    rules: Rules = ()
    way: PositionMethod = field(default_factory=PositionMethod)


def refusal(what: str, numbers: str = "", hint: str = "") -> StrategyError:
    """Return the error for a model that context parallelism would compute differently."""
    default = "a strategy without cp; under cp, only F.scaled_dot_product_attention may combine positions"
    return StrategyError(what, numbers=numbers, hint=hint or default)


@dataclass(frozen=True)
class PositionSplit:
    """A split of the positions: the number of parts, and which positions each part holds."""

    size: int
    parting: Parting = contiguous


def block_rules(
    block: nn.Module, called: BlockCall, cut: PositionSplit, *, backward: bool, uncut: Sequence[frozenset[str]]
) -> tuple[Rules, PositionMethod]:
    """Return how the outputs of the block are split, and how the block works on parts. backward: compare gradients too.

    uncut: sets of arguments that stay whole; the first set that is correct is used. If parts differ, the module in
    which they first differ is tried on all positions. Raises StrategyError if parts of the positions give other results
    than all positions.
    """
    refused: StrategyError | None = None
    for args in dict.fromkeys(uncut):
        way = PositionMethod(uncut=args, across=None)
        for _ in range(_MODULES):
            try:
                return _rules(block, called, cut, way, backward)
            except _Differs as error:
                refused = refused or error.refusal
                more = _grown(block, way.whole, error.where)
                if more is None:
                    break
                way = replace(way, whole=more)
    assert refused is not None
    raise refused


def _grown(block: nn.Module, whole: frozenset[str], where: str | None) -> frozenset[str] | None:
    """Return `whole` plus the module `where`, or plus its parent if `where` is in `whole` already.

    Return None if too few matrices would run on parts.
    """
    while where and where in whole:
        where = where.rpartition(".")[0]
    # Containers of modules are never called.
    while where and isinstance(block.get_submodule(where), nn.ModuleList | nn.ModuleDict):
        where = where.rpartition(".")[0]
    if not where:
        return None
    more = frozenset({where, *(path for path in whole if not path.startswith(f"{where}."))})
    return more if share_outside(block, more) >= _LEAST else None


def _rules(
    block: nn.Module, called: BlockCall, cut: PositionSplit, way: PositionMethod, backward: bool
) -> tuple[Rules, PositionMethod]:
    failed: Exception | None = None
    where: str | None = None
    # Random weights may give NaN, and the code may require another precision. Then use the model's own.
    for drawn, dtype in ((True, torch.float64), (False, torch.float64), (False, None)):
        try:
            with _weights(block, drawn, dtype), _on_all(block, way.whole):
                comparison = _Comparison(block, _cast(called, dtype, drawn), cut, way, backward)
                try:
                    rules = comparison.rules()
                except StrategyError as error:
                    # If the block draws random numbers itself, no module is the cause.
                    raise _Differs(error, None if comparison.draws else comparison.where()[1]) from None
                except Exception:
                    where = comparison.where()[1] if where is None else where
                    raise
            if rules is not None:
                return rules, replace(way, across=frozenset(comparison.noted))
        except (_Differs, NbkitError):
            raise
        except Exception as error:
            failed = error
    said = " ".join(f"{type(failed).__name__}: {failed}".split()) if failed else "it gives NaN"
    recomputed = "Checkpoint" in type(failed).__name__
    hint = (
        "turn off the model's own activation checkpointing: compute=nbkit.Compute(recompute=True) does the same"
        if recomputed
        else ""
    )
    raise _Differs(
        refusal(f"The block {called.name!r} fails if it gets only some of the positions.", said[:300], hint), where
    )


class _Differs(Exception):
    """Parts give another result than the whole.

    where: path, inside the block, of the first module that differs; "" for the block's own forward, None if unknown.
    """

    def __init__(self, refusal: StrategyError, where: str | None) -> None:
        super().__init__()
        self.refusal, self.where = refusal, where


@contextmanager
def _on_all(block: nn.Module, paths: Collection[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for path in sorted(paths):
            part = block.get_submodule(path)
            before = vars(part).get("forward")
            part.forward = on_all(part.forward)  # type: ignore[method-assign]
            stack.callback(partial(_put_back, part, before))
        yield


def _put_back(part: nn.Module, forward: Any) -> None:
    if forward is None:
        del part.forward
    else:
        part.forward = forward


class _Comparison:
    """A comparison of a block on all positions with the same block on parts."""

    def __init__(
        self, block: nn.Module, called: BlockCall, cut: PositionSplit, way: PositionMethod, backward: bool
    ) -> None:
        self.noted: set[int] = set()
        self.block, self.called, self.cut, self.backward = block, called, cut, backward
        self.plain, self.draws = block.forward, list[str]()
        self.peers = Threads(cut.size, cut.parting)
        self.spread = Spread(
            called.name, self.peers, first=True, last=False, strict=False, attends=False, way=way, noted=self.noted
        )
        # Leave out a mask with -inf, because only some kernels compute its gradient.
        self.inputs = [x for x in tree_leaves((called.args, called.kwargs)) if _floats(x) and bool(x.isfinite().all())]
        for x in self.inputs:
            x.requires_grad_(backward)

    def rules(self) -> Rules | None:
        """Return the rules (see block_rules), or None if the output is not finite, so that nothing can be compared."""
        with coarsest() as seen:
            whole = self._whole()
        if not all(bool(x.isfinite().all()) for x in whole if _floats(x)):
            return None
        try:
            parts = self._parts()
            pairs = [joined(w, p, self.cut.parting) for w, p in zip(whole, zip(*parts, strict=True), strict=True)]
        except NbkitError:
            raise
        except ValueError as error:
            raise self._differs(str(error)) from None
        for (rule, _), x, *others in zip(pairs, whole, *parts, strict=True):
            if rule is None and max(gap(x, other) for other in others) > _EXACT:
                raise self._differs("the output of a part is not the same part of the whole output")
        given = [together for _, together in pairs]
        apart = self._apart(whole, given)
        if apart > _EXACT and (apart > _ROUNDED or apart > _NOISE * self._apart(whole, self._whole(seen.eps))):
            raise self._differs(f"parts differ from the whole by {apart:.2g} of the largest value")
        return tuple(rule for rule, _ in pairs)

    def _whole(self, nudged: float = 0.0) -> list[Tensor]:
        args, kwargs = self.called.args, self.called.kwargs
        if nudged:
            args, kwargs = tree_map_only(Tensor, partial(_nudged, least=nudged), (args, kwargs))
        return _tensors(self._run(self.plain, args, kwargs))

    def _parts(self) -> list[list[Tensor]]:
        around = self.spread.around(self.plain)
        found = self.peers.run(lambda: self._run(around, self.called.args, self.called.kwargs))
        return [_tensors(part) for part in found]

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        set_seed(0)
        drawing = redrawing(self.block, tree_leaves((args, kwargs)))
        with torch.set_grad_enabled(self.backward), DroppingNothing(), Draws(self.draws), drawing:
            return forward(*args, **kwargs)

    def _apart(self, whole: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """Return the largest gap between the outputs and, with backward, the gradients of all inputs and parameters."""
        found = max((gap(w, o) for w, o in zip(whole, other, strict=True)), default=0.0)
        if not self.backward or found > _ROUNDED:
            return found
        expected, given = self._gradients(whole), self._gradients(other)
        largest = max((float(grad.abs().max()) for grad in expected if grad.numel()), default=0.0)
        gaps = (gap(e, g, 1e-4 * largest) for e, g in zip(expected, given, strict=True))
        return max(found, max(gaps, default=0.0))

    def _gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)
        learned = [x for x in outputs if x.requires_grad]
        weights = [_noise(x, draw) for x in learned]
        wanted = [x for x in (*self.inputs, *self.block.parameters()) if _floats(x) and x.requires_grad]
        found = gradients(learned, wanted, weights)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found, strict=True)]

    def _differs(self, numbers: str) -> StrategyError:
        if self.draws:
            return refusal(
                f"The block {self.called.name!r} draws random numbers itself, and would draw different ones for a "
                "part of the positions.",
                f"by {self.draws[0]}",
                "nn.Dropout or F.dropout, which nbkit makes independent of the strategy; or a strategy without cp",
            )
        call, path = self.where()
        where = f"{call} in {path}" if path else call
        return refusal(
            f"Outside of attention, the block {self.called.name!r} combines positions.",
            f"compared on {self.cut.size} parts of the positions: {numbers}"
            + (f"; first seen in {where}" if where else ""),
        )

    def where(self) -> tuple[str, str | None]:
        """Return (the first call in which parts differ, path of its module)."""
        trace, logs = CallTrace(self.block), [list[Any]() for _ in range(self.cut.size + 1)]
        peers, args, kwargs = self.peers, self.called.args, self.called.kwargs
        try:
            around = self.spread.around(trace.around(self.plain, lambda: logs[peers.rank()]))
            self._run(trace.around(self.plain, lambda: logs[-1]), args, kwargs)
            peers.run(lambda: self._run(around, args, kwargs))
        except Exception:
            pass
        return first_difference(logs[-1], logs[:-1], self.cut.parting) or ("", None)


def _cast(called: BlockCall, dtype: torch.dtype | None, drawn: bool) -> BlockCall:
    """Return the call with copies of its tensors in `dtype`. drawn: add noise to the hidden states."""

    def copied(x: Tensor) -> Tensor:
        if dtype is not None and x.is_floating_point():
            return x.detach().to(dtype, copy=True)
        return x.detach().to(torch.complex128) if dtype is not None and x.is_complex() else x.detach().clone()

    def disturbed(x: Tensor) -> Tensor:
        if not _floats(x):
            return x
        noise = _noise(x, torch.Generator().manual_seed(2))
        return x + noise * max(float(x.std()) if x.numel() > 1 else 0.0, 0.1)

    args, kwargs = tree_map_only(Tensor, copied, (called.args, called.kwargs))
    if drawn and args:
        args = (tree_map_only(Tensor, disturbed, args[0]), *args[1:])
    elif drawn and kwargs:
        first = next(iter(kwargs))
        kwargs = {**kwargs, first: tree_map_only(Tensor, disturbed, kwargs[first])}
    return BlockCall(called.name, args, kwargs)


@contextmanager
def _weights(block: nn.Module, drawn: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """Make the block compute in `dtype` (None: its own) inside this context, with random weights if `drawn`."""
    draw = torch.Generator().manual_seed(3)
    params = [(places, getattr(*places[0])) for places in homes(block).values()]
    others = [
        (holder, key, tensor)
        for part in block.modules()
        for holder in (part._buffers, vars(part))
        for key, tensor in holder.items()
        if isinstance(tensor, Tensor) and _floats(tensor) and dtype is not None
    ]
    try:
        for places, param in params:
            own = nn.Parameter(_drawn(param.detach(), draw, drawn, dtype), requires_grad=_floats(param))
            copies.replace_submodule(places, copies.marked(own, param))
        for holder, key, tensor in others:
            holder[key] = tensor.detach().to(dtype)
        yield
    finally:
        for places, param in params:
            copies.replace_submodule(places, param)
        for holder, key, tensor in others:
            holder[key] = tensor


def _drawn(value: Tensor, draw: torch.Generator, drawn: bool, dtype: torch.dtype | None) -> Tensor:
    value = value.to(dtype) if dtype is not None and _floats(value) else value
    if not drawn or not _floats(value):
        return value
    noise = _noise(value, draw)
    # Replace matrices by random ones. Add noise to vectors and scalars, such as the weights of norms.
    return noise / max(value[0].numel(), 1) ** 0.5 if value.ndim > 1 else value + 0.2 * noise


def _nudged(x: Tensor, least: float) -> Tensor:
    if not _floats(x):
        return x
    size = max(_NUDGE if x.dtype == torch.float64 else torch.finfo(x.dtype).eps, least)
    return x + x * _noise(x, torch.Generator().manual_seed(4)) * size


def _noise(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=draw).to(like.device, like.dtype)


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
