"""The first runs of a model on an example: what the model draws itself, and on how few positions it behaves the same.

The data flow, the order of blocks and the readers of a weight do not depend on the length of the rows, as long as the
model makes the same operations. So the proofs of these, and a whole step, use only a few positions of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite, lcm
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.rank.data.batch import call, on_device, pair, pick, rows_of
from nbkit.rank.data.sample_rows import undrawn
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_weights import Loss, weigh
from nbkit.rank.parallel.proof.observe import gap
from nbkit.rank.parallel.proof.outside_state import OutsideState, OutsideUse, find_caches, find_outside
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.rank.rng.host_generators import seed_others
from nbkit.rank.rng.keyed_dropout import find_draws
from nbkit.rank.torch_private import tree_leaves
from nbkit.rank.watching_mode import WatchingMode

_READS = frozenset({"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"})
_POSITIONS = 16
"""This many positions show as much as all. The remainder of the length modulo this is kept, for splits and patches."""


@dataclass(frozen=True)
class FirstRuns:
    """The result of the first runs.

    draws: the random numbers that the model itself draws. short: the example with a few positions of each row, on which
    the model makes the same operations and gives a finite loss; None if there is no such example. outside: the state
    outside parameters and buffers that the model and the loss change and read. reads: True if they read values of
    tensors, so that they may depend on them. changes: True if they change state outside parameters and buffers, even if
    they do not read it. caches: numbers in attributes that describe cached objects, see find_caches.
    """

    draws: DrawPlan | None = None
    short: Any = None
    outside: OutsideUse | None = None
    reads: bool = False
    changes: bool = False
    caches: frozenset[tuple[str, str]] = frozenset()


def first_runs(
    module: nn.Module, example: Any, *, inputs: Sequence[str] | None, loss: Loss | None, parts: int = 1
) -> FirstRuns:
    """Return what running `module` on a few rows of `example` shows.

    parts: number of parts into which positions may be split. The module and the random generators are restored. Errors
    are ignored here, because training reports them.
    """
    runs = _Runs(module, inputs, loss)
    with suppress(Exception), undrawn(), unchanged(module):
        state = OutsideState(module, loss)
        short = _shortened(example, pair(example, inputs)[0], lcm(_POSITIONS, parts))
        # Use one row, because running all positions of a row takes most of the time here.
        if short is None or (whole := runs.operations(example)) is None or runs.operations(short) != whole:
            short = None
        few = example if short is None else short
        draws = find_draws(module, runs.of(few))
        outside, caches = None, frozenset[tuple[str, str]]()
        changes = bool(state.changes())  # after the forward alone, because a loss may reset it
        state.put_back()
        seen = _Operations()
        with suppress(Exception):  # if the loss fails, the draws of the model are still known
            with unchanged(module), seen:
                first = runs.seeded(few, [0, 1])
                changed, drawn = bool(state.changes()), state.drawn()
            state.put_back()
            with unchanged(module):
                off = _apart(first, runs.seeded(few, [0, 1]))
            if off and not (draws is not None and draws.unkeyed):
                outside = OutsideUse(tuple(state.unkept), True, False, True, unseen=off)
            elif changed:
                state.put_back()
                buffers = _Buffers(module)

                def seeded(rows: Sequence[int]) -> Any:
                    buffers.put_back()  # buffers may carry state from pass to pass, on every rank
                    return runs.seeded(few, rows)

                outside = find_outside(seeded, state, two=rows_of(few) > 1)
                caches = find_caches(seeded, state) if outside is None else caches
            if outside is None and drawn:
                outside = OutsideUse(tuple(drawn), False, False, False, drawn=True)
        reads = any(str(each) in _READS for each in seen.operations)
        return FirstRuns(draws, short, outside, reads, changes, caches)
    return FirstRuns()


@dataclass(frozen=True)
class _Runs:
    module: nn.Module
    inputs: Sequence[str] | None
    loss: Loss | None

    def of(self, example: Any) -> Callable[[int], Any]:
        """Return a function that runs the model on a number of rows."""
        return lambda rows: self._output(example, rows)[0]

    def operations(self, example: Any) -> list[Any] | None:
        """Return the operations of the model and the loss on one row, or None on an error or if the loss is not
        finite."""
        seen = _Operations()
        with suppress(Exception), torch.no_grad(), seen:
            output, target = self._output(example, 1)
            if self.loss is None or isfinite(float(weigh(self.loss(output, target), 1).value)):
                return seen.operations
        return None

    def seeded(self, example: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """Return the model's outputs for these rows, and the loss, with the same random numbers each time."""
        torch.manual_seed(0)
        seed_others(0)
        with torch.no_grad():
            output, target = self._output(example, len(rows), rows)
            loss = None if self.loss is None else weigh(self.loss(output, target), len(rows)).value
        return list(leaves(output).values()), loss

    def _output(self, example: Any, rows: int, numbers: Sequence[int] | None = None) -> tuple[Any, Any]:
        """Return (output of the model, targets)."""
        device, held = next((p.device for p in self.module.parameters()), torch.device("cpu")), rows_of(example)
        part = on_device(pick(example, [i % held for i in numbers or range(rows)], rows=held), device)
        value, target = pair(part, self.inputs)
        return call(self.module, value), target


def _apart(one: Any, other: Any) -> float:
    """Return the difference between two passes, relative to their values, or 0 if rounding explains it."""
    ours, theirs = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in (one, other))
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return inf
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        least = min(64 * torch.finfo(a.dtype).eps, 3e-2) if a.is_floating_point() else 0.0
        off = gap(a, b)
        most = max(most, off) if off > least else most
    return most


class _Buffers:
    """The buffers of a model at the time when this object was created."""

    def __init__(self, module: nn.Module) -> None:
        held = [(part._buffers, name) for part in module.modules() for name in part._buffers]
        self._held = [(home, name, home[name], _clone(home[name])) for home, name in held]

    @torch.no_grad()
    def put_back(self) -> None:
        for home, name, buffer, content in self._held:
            home[name] = buffer
            if buffer is not None and content is not None:
                buffer.copy_(content)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _shortened(example: Any, value: Any, multiple: int) -> Any:
    """Return `example` with a few positions, spread over the row, because masks may hide the first or last ones."""
    lengths = [
        tensor.shape[1]
        for tensor in leaves(value).values()
        if (tensor.ndim == 2 and not tensor.is_floating_point()) or tensor.ndim == 3
    ]
    if not lengths or lengths[0] < 3 * multiple:
        return None
    length, few = lengths[0], multiple + lengths[0] % multiple
    places = torch.arange(few) * (length - 1) // (few - 1)

    def of(_: str, tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == length:
                tensor = tensor.index_select(dim, places.to(tensor.device))
        return tensor

    return with_leaves(example, of)


class _Operations(WatchingMode):
    """Records the operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))
