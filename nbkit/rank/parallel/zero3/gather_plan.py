"""Finds the blocks of a model that ZeRO 3 gathers one at a time, by a dry run of its protocol on one process.

The model runs forward and backward on an example, its own weights in place, while the protocol of ZeRO 3 is followed
without sending anything: which units would be gathered, let go and reduced when. Every use of a parameter is seen. What
is used while its unit would not be there is gathered with the root instead, which stays for the whole pass; so is a
block that runs in another order than all ranks could keep to (one that is called twice, say). What then goes through is
the plan. Models are never rewritten, and their structure only says where to look for blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.proof.calls import call_counts
from nbkit.rank.parallel.proof.memory import MemoryUses, memory_of, tensors_in
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.parallel.zero3.backward_order import OutOfOrder
from nbkit.rank.parallel.zero3.dry_run import Uses, rehearse
from nbkit.rank.parallel.zero3.gather_dtypes import Casts, find_casts
from nbkit.rank.parallel.zero3.placeholder import used_outside
from nbkit.rank.parallel.zero3.weight_reads import changed_in_place

_ATTEMPTS = 8


@dataclass(frozen=True)
class GatherPlan:
    """Plain data, the same on every rank that gets it.

    units: names of the blocks that are gathered one at a time, in the order of forward. rooted: names of parameters in
    them that are gathered with the root. ahead: units gathered before backward comes to them. refused: why ZeRO 3 would
    not train as one process does. notes: what is gathered for longer, and why. casts: what is gathered in the dtype of
    autocast, None where nothing is.
    """

    units: tuple[str, ...] = ()
    rooted: frozenset[str] = frozenset()
    ahead: int = 1
    refused: TrainingError | None = None
    notes: tuple[str, ...] = ()
    casts: Casts | None = None


def plan_gathers(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    brief: Callable[[], Any] | None = None,
    autocast: torch.dtype | None = None,
) -> GatherPlan:
    """The plan of `module`, which is in the mode in which it trains, and is afterwards as before.

    call: runs the whole model once on an example, and returns its output or the loss. brief: makes the same operations
    on fewer numbers; what fails or is refused there is tried with `call`. autocast: the dtype in which the model
    trains. Raises what the model raises.
    """
    if brief is not None:
        with suppress(Exception):
            if (plan := _plan(module, brief, autocast)).refused is None:
                return plan
    return _plan(module, call, autocast)


def _plan(module: nn.Module, call: Callable[[], Any], autocast: torch.dtype | None) -> GatherPlan:
    def run() -> Tensor:
        return _sum(call())

    with unchanged(module), _kept(module):
        candidates = structural_blocks(module)
        counts = call_counts(module, call)
        notes = {name: f"called {counts[name]} times" for name in candidates if counts[name] != 1}
        names = [name for name in counts if name in candidates and counts[name] == 1]
        plan = _tried(module, names, notes, run)
    if autocast is None or plan.refused is not None:
        return plan
    casts = None
    with suppress(Exception):  # then all is gathered as it is
        casts = find_casts(module, run, autocast)
    return replace(plan, casts=casts)


def _tried(module: nn.Module, names: list[str], notes: dict[str, str], run: Callable[[], Tensor]) -> GatherPlan:
    """The first plan that goes through; the one without units is left in the end."""
    rooted: frozenset[str] = frozenset()
    ahead = 1
    refused: TrainingError | None = None
    for attempt in range(_ATTEMPTS):
        if attempt == _ATTEMPTS - 1:
            names = []
        uses = Uses()
        try:
            with unchanged(module):
                names = rehearse(module, names, rooted, ahead, run, uses)
        except OutOfOrder as error:
            if error.again and ahead < len(names):
                ahead = min(2 * ahead, len(names))
            else:
                notes[error.unit] = error.what
                names = [name for name in names if name != error.unit]
            continue
        except TrainingError as error:
            if names:
                names = []
                continue
            refused = error
        if uses.changed is not None:
            refused = changed_in_place(*uses.changed)
        if refused is not None or uses.outside.keys() <= rooted:
            break
        rooted |= uses.outside.keys()
        notes |= uses.outside
    if refused is None and uses.outside:
        name, how = next(iter(uses.outside.items()))
        refused = used_outside(name, "the model", how)
    shown = [f"{name} ({why})" for name, why in notes.items()]
    said = f"gathered for a whole pass: {', '.join(shown[:4])}{', ...' * (len(shown) > 4)}"
    return GatherPlan(tuple(names), rooted, ahead, refused, (said,) if shown else ())


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Gradients are let go as soon as they are made; parameters hold afterwards what they held before."""
    data = [(p, p.data) for p in module.parameters()]
    before: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def keep(param: nn.Parameter, _: Tensor, __: str, changed: bool) -> None:
        if changed and id(param) not in before:
            before[id(param)] = param, param.detach().clone()

    def let_go(p: Tensor) -> None:
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(let_go) for p, _ in data if p.requires_grad]
    try:
        with MemoryUses({memory_of(p): p for p, _ in data}, keep):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for param, old in data:
                param.data = old
            for param, value in before.values():
                param.copy_(value)


def _sum(output: Any) -> Tensor:
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return sum((tensor.abs().sum().double() for tensor in found), torch.zeros((), dtype=torch.float64))
