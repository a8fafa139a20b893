"""Which blocks of a model ZeRO 3 gathers one at a time: found by a dry run of its protocol on one process.

The model runs forward and backward on an example, its own weights in place, while the protocol of ZeRO 3 is followed
without sending anything: which units would be gathered, let go and reduced when. Every use of a parameter is seen. What
is used while its unit would not be there is gathered with the root instead, which stays for the whole pass; so is a
block that runs in another order than all ranks could keep to (one that is called twice, say). What then goes through is
the plan. Models are never rewritten, and their structure only says where to look for blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.pipeline.layer_chain import unchanged
from nbkit.rank.parallel.pipeline.partial_forward import plain_attention
from nbkit.rank.parallel.pipeline.trace_dataflow import tensors_in, written_by
from nbkit.rank.parallel.zero3.backward_order import OutOfOrder
from nbkit.rank.parallel.zero3.dry_run import Uses, rehearse
from nbkit.rank.parallel.zero3.placeholder import used_outside
from nbkit.rank.parallel.zero3.weight_reads import changed_in_place

__all__ = ["GatherPlan", "plan_gathers"]

_ATTEMPTS = 8


@dataclass(frozen=True)
class GatherPlan:
    """Plain data, the same on every rank that gets it.

    units: names of the blocks that are gathered one at a time, in the order of forward. rooted: names of parameters in
    them that are gathered with the root. ahead: units gathered before backward comes to them. refused: why ZeRO 3 would
    not train as one process does. notes: what is gathered for longer, and why.
    """

    units: tuple[str, ...] = ()
    rooted: frozenset[str] = frozenset()
    ahead: int = 1
    refused: TrainingError | None = None
    notes: tuple[str, ...] = ()


def plan_gathers(module: nn.Module, call: Callable[[], Any], loss: Callable[[], Tensor] | None = None) -> GatherPlan:
    """The plan of `module`, which is in the mode in which it trains, and is afterwards as before.

    call: runs the whole model once on an example and returns its output. loss: does so too, and returns the loss, a
    scalar; None: the sum of the output. Raises what the model raises.
    """
    run = loss or (lambda: _sum(call()))
    with unchanged(module), plain_attention(), _kept(module):
        candidates = structural_blocks(module)
        counts = _counts(module, candidates, call)
        notes = {name: f"called {counts.get(name, 0)} times" for name in candidates if counts.get(name) != 1}
        return _tried(module, [name for name in counts if counts[name] == 1], notes, run)


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


class _Originals(TorchDispatchMode):
    """Keeps what parameters held before an operation changed them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._params = {StorageWeakRef(p.untyped_storage()): p for p in module.parameters()}
        self.data = [(p, p.data) for p in module.parameters()]
        self.before: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            param = self._params.get(StorageWeakRef(tensor.untyped_storage()))
            if param is not None and id(param) not in self.before:
                self.before[id(param)] = param, param.detach().clone()
        return func(*args, **(kwargs or {}))


def _counts(module: nn.Module, names: Sequence[str], call: Callable[[], Any]) -> dict[str, int]:
    """How often each of the modules is called, in the order of the first calls."""
    counts: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(module.get_submodule(name).register_forward_pre_hook(count(name)).remove)
        call()
    return counts


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Gradients are let go as soon as they are made; parameters are afterwards as before, frozen or not."""
    params = [(p, p.requires_grad) for p in module.parameters()]

    def let_go(p: Tensor) -> None:
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(let_go) for p, trained in params if trained]
    originals = _Originals(module)
    try:
        with originals:
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for p, trained in params:
            p.requires_grad_(trained)
        with torch.no_grad():
            for param, data in originals.data:
                param.data = data
            for param, value in originals.before.values():
                param.copy_(value)


def _sum(output: Any) -> Tensor:
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return sum((tensor.abs().sum().double() for tensor in found), torch.zeros((), dtype=torch.float64))
