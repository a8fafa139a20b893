"""Try an optimizer on small tensors: compare its updates of parts of parameters with its updates of whole parameters.

The name of an optimizer decides nothing. Several copies make the same steps side by side: one over whole tensors, the
others over the parts that ranks of a strategy hold, or with a state that was carried over in between, as a switch does.
If their weights differ, the strategy (or the switch) would train another model.

Number of steps: it must reach everything that an optimizer does late or rarely. Prodigy and D-Adaptation use an
estimate over all parameters from the second step on. Lookahead updates its slow weights every 5 or 6 steps. Some
optimizers compute preconditioners every 10 steps, or from step 25 on. 31 steps are enough for all of these, and 31 is
no multiple of a common period. An integer among the settings is often such a period, so larger integers add steps.

Size of tensors: an optimizer may treat small tensors, vectors or matrices in a special way. So the tensors have the
sizes of the model's parameters, up to a limit. Beyond it known optimizers change nothing: 8-bit states begin at 4,096
elements, factored ones at 128 rows and columns.

`Need` says how much the update of a tensor has to see at once. To find it, parts of all tensors are updated, then each
tensor alone, then each group alone. The first arrangement that gives the same result as the whole shows the need. A
tensor whose update needs the whole tensor, but no other tensor, can be updated by one rank that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from enum import IntEnum
from inspect import getclosurevars, unwrap
from math import prod
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.comm import delegating_group
from nbkit.rank.parallel.proof.outside_state import outside_kept
from nbkit.rank.train.step.optimizer_state import per_element, per_parameter, remember, settings_of, take_settings

_STEPS, _MOST_STEPS, _CARRIED_AT = 31, 130, 13
_LARGEST = ((), (5120,), (136, 128), (64, 40, 2), (64, 40, 2, 2))
"""Largest shape of the tensors, by number of dims. 136 x 128 consists of whole blocks of 256; its parts do not."""
_SAME_KIND = 2  # number of tensors tried for each group and number of dims; one of them is large
_TOLERANCE = {torch.float64: (1e-6, 1e-13), torch.float32: (1e-3, 1e-6)}
"""(fraction of the weights' movement, fraction of the weights): smaller differences are rounding."""

Part = tuple[slice, ...]
Copy = tuple[Any, list[tuple[str, nn.Parameter, Part]]]
"""An optimizer and the parameters it updates: (name of a tensor, parameter, part of the tensor)."""
_SCALES = {_CARRIED_AT + 2: 1e-3, _CARRIED_AT + 6: 1e3}
"""Step -> factor of the gradients. It makes their norm once very small and once very large, to test clipping."""
_FAILED = "failed: "
_NEEDS = {"across": 1, "rows": 2, "each": 3, "groups": 4}
"""Arrangement -> the Need of a tensor whose update differs in it."""
_PLAIN = "strategy='ddp', or an optimizer such as AdamW or SGD"
_REACHABLE = "hold them in attributes of the optimizer, or take an optimizer such as AdamW or SGD"


class Need(IntEnum):
    """The part of the model that the update of a tensor has to see at once."""

    ELEMENT = 0
    ROW = 1
    """All elements with the same index along dim 0."""
    TENSOR = 2
    GROUP = 3
    """All tensors of a parameter group."""
    ALL = 4
    """All parameters."""


class OptimizerSends(Exception):
    """The optimizer sends messages to other ranks."""


class _Reads(TorchFunctionMode):
    """Notes if a torch function gets one of `tensors`, or if the gradient of one is read."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.found = False
        self._ids = {id(tensor) for tensor in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found:
            several = [arg for arg in args if isinstance(arg, list | tuple)]
            self.found = any(id(value) in self._ids for values in (args, *several) for value in values)
        return func(*args, **(kwargs or {}))


class OptimizerTrial:
    """Tries an optimizer on small tensors.

    build: (held, settings, like=...) -> a copy of the optimizer over `held`, see OptimizerSpec._small.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[Sequence[str]],
        params: Mapping[str, nn.Parameter],
        build: Callable[..., Any],
    ) -> None:
        self.name, self.build = name, build
        self.draws = False  # its steps draw random numbers
        self._shapes = _chosen(groups, params)
        self._groups = [[name for name in names if name in self._shapes] for names in groups]
        self._on, self._dtype = torch.device("cpu"), torch.float64
        self._failed = ""  # why no step could be made
        self._found: dict[str, str] = {}
        self._differing: dict[str, dict[str, str]] = {}  # arrangement -> {tensor: where and how far it differs}
        self._owned: dict[str, list[str]] = {}  # by `cut`
        self._still: list[str] = []  # tensors that it did not update
        self._reads = False  # its steps over other tensors read parameters of the model
        self._keyed = ""  # the mapping in which its steps use a parameter of the model as a key

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "build": None}

    def check(self, made: Any, real: Iterable[nn.Parameter]) -> None:
        """Raise TrainingError if copies of the optimizer do not behave like it, under any strategy.

        made: the optimizer itself. real: the parameters of the model.
        """
        real = list(real)
        before = [p._version for p in real]
        device = real[0].device if real else self._on
        with _Reads(real) as reads:
            differs = self._again(device)
        self._reads, self._keyed = reads.found, _keyed(made, {id(p) for p in real})
        if self._failed:
            return  # it may refuse only small tensors. A strategy that does not split trains as plain torch does
        if self._still:
            raise TrainingError(
                f"A copy of {self.name} does not update all parameters of its groups, because its optimizers or "
                "functions hold parameters where the copy does not find them.",
                numbers=f"{len(self._still)} of {len(self._shapes)} that were tried: {', '.join(self._still[:3])}",
                hint=_REACHABLE,
            )
        if [p._version for p in real] != before:
            raise TrainingError(
                f"A step of a copy of {self.name}, which has its own tensors, changes parameters of the model: the "
                "optimizer holds them where the copy does not find them.",
                numbers=f"{sum(p._version != was for p, was in zip(real, before, strict=True))} of {len(real)}",
                hint=_REACHABLE,
            )
        if differs:
            raise TrainingError(
                f"{self.name} keeps state outside of itself: in a variable of a function, in a global variable or in "
                "a generator of random numbers. Two copies made different updates from the same gradients.",
                numbers=differs,
                hint="keep it in self.state[p], or in an attribute of the optimizer",
            )

    def _again(self, device: torch.device) -> str:
        """Return how two copies over whole tensors differ, "" if they do not.

        Tries float64 on the CPU, then float32 on the CPU, then float32 on `device`.
        """
        if not self._tried("saved"):
            return ""
        kinds = [(torch.device("cpu"), torch.float64), (torch.device("cpu"), torch.float32), (device, torch.float32)]
        why = ""
        for self._on, self._dtype in dict.fromkeys(kinds):
            self._found.clear()
            if not (differs := self._tried("again")).startswith(_FAILED):
                return differs
            why = why or differs.removeprefix(_FAILED)
        if self._takes_closure():
            raise TrainingError(
                f"{self.name} needs a closure, to compute the loss several times in a step, but nbkit computes it "
                "once.",
                numbers=f"step() fails without a closure: {why}",
                hint="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
            )
        self._failed = why
        return ""

    def needs(self) -> dict[str, Need]:
        """Return name -> Need, for each tensor that is tried.

        If the optimizer raises an error on an arrangement of parts, the arrangement counts as different.
        """
        found = dict.fromkeys(self._shapes, Need.ELEMENT)
        for kind, need in _NEEDS.items():
            if not (differing := self._apart_in(kind)) and kind != "across":
                break
            found.update(dict.fromkeys(differing, Need(need)))
        if len([names for names in self._groups if names]) == 1:
            return {name: Need.ALL if need == Need.GROUP else need for name, need in found.items()}
        return found

    def owned(self, cut: str) -> Sequence[str]:
        """Return the tried tensors that one rank has to update as a whole, if that gives the updates of one process.

        cut: "rows" if a strategy splits tensors by rows, "columns" if by rows and columns.
        """
        if cut not in self._owned:
            self._owned[cut] = []
            if not self._failed and self._tried(cut):
                least = Need.ROW if cut == "columns" else Need.TENSOR
                self._owned[cut] = [name for name, need in self.needs().items() if least <= need <= Need.TENSOR]
                if self._tried(f"{cut} and owners"):
                    self._owned[cut] = []
        return self._owned[cut]

    def _apart_in(self, kind: str) -> dict[str, str]:
        """Return tensor -> where and how far its update differs under the arrangement `kind`."""
        if not (found := self._tried(kind)):
            return {}
        return dict.fromkeys(self._shapes, found) if found.startswith(_FAILED) else self._differing[kind]

    def check_parts(self, kind: str, strategy: str, cost: Callable[[], str] = lambda: "") -> None:
        """Raise TrainingError if ranks that hold parts would make other updates than one process.

        kind: "rows" or "columns" if ranks hold parts of tensors; with " and owners" if some tensors are whole on one
        rank; "tensors" if each rank holds some of the tensors. cost: returns the cost of updating whole tensors, for
        the error.
        """
        splits = "gives each rank some of the parameters" if kind == "tensors" else "splits parameters over ranks"
        updates = splits if kind == "tensors" else "splits the update of a parameter over ranks"
        alone = " does not update each element by itself, and "
        if kind == "tensors":
            alone = " does not update each parameter by itself, and "
        if self._reads or self._keyed:
            raise TrainingError(
                f"{self.name} reads parameters of the model that it was made for, but {strategy} {splits}, and a "
                "step updates those instead.",
                numbers=self._keyed or "a copy of it did so, by a function or an attribute that holds the model",
                hint="read self.param_groups, or the optimizer that a hook gets; or strategy='ddp'",
            )
        differs = _FAILED + self._failed if self._failed else self._tried(kind)
        if differs.startswith(_FAILED):
            raise TrainingError(
                f"nbkit tries {self.name} on small tensors first, because {strategy} {splits}, and {self.name} failed.",
                numbers=differs.removeprefix(_FAILED),
                hint=_PLAIN,
            )
        if differs:
            raise TrainingError(
                f"{self.name}{alone}{strategy} {updates}, so the results would differ from those of one process.",
                numbers=differs + cost(),
                hint=_PLAIN,
            )

    def lost_in_a_checkpoint(self, cuts: Sequence[str]) -> str:
        """Return the same as `lost_in_a_switch`, for copies that get only the contents of a checkpoint."""
        return self._failed or self._tried("saved") or self._lost_in(cuts)

    def lost_in_a_switch(self, cuts: Sequence[str]) -> str:
        """Return the evidence that copies with the same state make other steps than the optimizer; "" if they do not.

        cuts: "rows" or "columns" if ranks have parts of tensors before or after the switch; "tensors" if each has some
        of the tensors.
        """
        known = self._keyed or self._failed
        if known or (self._tried("saved") and self._tried("carried")):
            return known or self._tried("carried")
        return self._lost_in(cuts)

    def _lost_in(self, cuts: Sequence[str]) -> str:
        return next((lost for cut in cuts if (lost := self._tried(f"carried in {cut}"))), "")

    def _tried(self, kind: str) -> str:
        if kind not in self._found:
            with _aside():
                self._found[kind] = self._compared(kind)
        return self._found[kind]

    def _compared(self, kind: str) -> str:
        """Return where and how far the copies differ; "" if they do not."""
        draw = torch.Generator().manual_seed(0)
        start = {name: self._drawn(shape, draw) * 0.5 for name, shape in self._shapes.items()}
        pushes = [self._drawn(shape, draw) * 2.0 ** (n % 4) for n, shape in enumerate(self._shapes.values())]
        noise = self._drawn((max(map(prod, self._shapes.values()), default=0) + 7 * _MOST_STEPS,), draw)
        kept = ExitStack()
        differing: dict[str, str] = {}
        try:
            hooks = kind != "again"  # a hook may clip or keep state. Many log, so run hooks only where necessary
            whole = self._over(start, {name: () for name in start}, hooks=hooks)
            kept.enter_context(outside_kept(nn.Module(), *_hooks_of(whole[0])))
            arranged, moves = self._arranged(kind), kind == "saved" or kind.startswith("carried")
            others = (
                [] if kind.startswith("carried in") else [self._over(start, parts, hooks=hooks) for parts in arranged]
            )
            for step in range(steps := _steps_for(whole[0])):
                if moves and step == _CARRIED_AT:
                    others = [self._carried(whole, parts, saved=kind == "saved") for parts in arranged]
                grads = {
                    name: (push + noise[7 * step : 7 * step + push.numel()].view(push.shape)) * _SCALES.get(step, 1.0)
                    for name, push in zip(start, pushes, strict=True)
                }
                drawn = _make_step(whole, grads, step)
                for other in others:
                    _make_step(other, grads, step)
                self.draws |= drawn
                if not all(bool(p.isfinite().all()) for _, p, _ in whole[1]):
                    break  # further steps show nothing
                apart = {name: f"{far} after {step + 1} of {steps} steps" for name, far in _apart(whole, others, start)}
                if apart and kind not in _NEEDS:
                    return next(iter(apart.values()))
                differing = apart | differing
            if kind in ("saved", "again"):
                self._still = [name for name, p, _ in whole[1] if p.numel() and torch.equal(p.detach(), start[name])]
        except OptimizerSends as error:
            raise TrainingError(
                f"{self.name} sends messages to other ranks in its step, but under a strategy nbkit sends them, and "
                "needs an optimizer of one process.",
                numbers=str(error),
                hint="optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4), and strategy='zero1'",
            ) from None
        except Exception as error:
            return f"{_FAILED}{type(error).__name__}: {error}"
        finally:
            kept.close()
        self._differing[kind] = differing
        return next(iter(differing.values()), "")

    def _drawn(self, shape: Sequence[int], draw: torch.Generator) -> Tensor:
        drawn = torch.randn(tuple(shape), generator=draw, dtype=torch.float64)
        if drawn.numel() and drawn.ndim:  # make all parts different
            rows = torch.linspace(0.5, 2.0, len(drawn), dtype=drawn.dtype)
            drawn *= rows.view(-1, *[1] * (drawn.ndim - 1))
        return drawn.to(self._on, self._dtype)

    def _over(self, start: Mapping[str, Tensor], parts: Mapping[str, Part], *, hooks: bool = False) -> Copy:
        held = {name: nn.Parameter(start[name][part].clone()) for name, part in parts.items()}
        return self.build(held, _rate, hooks=hooks), [(name, p, parts[name]) for name, p in held.items()]

    def _carried(self, whole: Copy, parts: Mapping[str, Part], *, saved: bool) -> Copy:
        """Return a copy over `parts` with the state of `whole`, moved as by a switch. saved: as by a checkpoint."""
        optimizer, updated = whole
        updated = [each for each in updated if each[0] in parts]
        held = {name: nn.Parameter(p.detach()[parts[name]].clone()) for name, p, _ in updated}
        copy = self.build(held, _rate, like=None if saved else optimizer, hooks=True)
        if saved:
            take_settings(copy, deepcopy(settings_of(optimizer)))
        for name, p, _ in updated:
            for key, value in per_element(optimizer, p).items():
                own = value[parts[name]]
                remember(copy, held[name], key, torch.empty(own.shape, dtype=own.dtype, device=own.device).copy_(own))
            for key, value in per_parameter(optimizer, p).items():
                remember(copy, held[name], key, value)
        return copy, [(name, p, parts[name]) for name, p in held.items()]

    def _arranged(self, kind: str) -> list[dict[str, Part]]:
        """Return, for each rank, tensor -> the part that the rank has."""
        names = list(self._shapes)
        if kind in ("again", "saved", "carried"):
            return [dict.fromkeys(names, ())]
        if kind == "each":
            return [{name: ()} for name in names]
        if kind == "groups":
            return [dict.fromkeys(group, ()) for group in self._groups if group]
        if kind.endswith("tensors"):
            half = (len(names) + 1) // 2
            return [dict.fromkeys(some, ()) for some in (names[:half], names[half:])]
        first: dict[str, Part] = {}
        second: dict[str, Part] = {}
        cut, _, with_owners = kind.removeprefix("carried in ").partition(" and ")
        owned = self.owned(cut) if with_owners else ()
        for n, (name, shape) in enumerate(self._shapes.items()):
            if name in owned:
                (second if n % 2 else first)[name] = ()
                continue
            first[name] = second[name] = ()
            if kind == "across":
                if len(shape) > 1 and shape[1] > 1:
                    at = shape[1] // 2 + shape[1] % 2
                    first[name], second[name] = (slice(None), slice(0, at)), (slice(None), slice(at, None))
                continue
            # Split every other tensor by columns: tensor parallelism splits by rows and by columns.
            dim = 1 if cut == "columns" and len(shape) > 1 and n % 2 == 0 else 0
            if shape and (cut == "rows" or (shape[dim] > 1 and (len(shape) > 1 or n % 2))):
                at = shape[dim] // 2 + 1 if shape[dim] > 2 else 1
                ahead: Part = (slice(None),) * dim
                first[name], second[name] = (*ahead, slice(0, at)), (*ahead, slice(at, None))
        return [first, second]

    def takes_rate(self) -> bool:
        """Return True if a change of "lr" in the groups changes the steps."""
        draw = torch.Generator().manual_seed(0)
        start = {name: self._drawn(shape, draw) for name, shape in self._shapes.items()}
        try:
            with _aside():
                one, other = (self._over(start, {name: () for name in start}) for _ in range(2))
                for group in other[0].param_groups:
                    group["lr"] = group["lr"] * 2
                for step in range(_CARRIED_AT):
                    for copy in (one, other):
                        _make_step(copy, start, step)
        except Exception:  # the optimizer may need real parameters
            return True
        return any(not torch.equal(p, q) for (_, p, _), (_, q, _) in zip(one[1], other[1], strict=True))

    def _takes_closure(self) -> bool:
        """Return True if `step` works with a closure and calls it."""
        self._on, self._dtype = torch.device("cpu"), torch.float64
        draw = torch.Generator().manual_seed(0)
        start = {name: self._drawn(shape, draw) for name, shape in self._shapes.items()}
        asked = []
        try:
            with _aside():
                optimizer, updated = self._over(start, {name: () for name in start})

                def closure() -> Tensor:
                    asked.append(True)
                    for _, p, _ in updated:
                        p.grad = torch.ones_like(p)
                    return torch.ones(())

                closure()
                optimizer.step(closure)
        except Exception:  # an optimizer may raise anything
            return False
        return len(asked) > 1


def _chosen(groups: Sequence[Sequence[str]], params: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors to try: the largest ones of each group, for each number of dims.

    Two tensors are taken where possible. With one, an update that depends on other tensors would not show.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for names in groups:
        by_dims: dict[int, list[str]] = {}
        for name in sorted(names, key=lambda name: -params[name].numel()):
            by_dims.setdefault(params[name].ndim, []).append(name)
        largest = {same[0] for same in by_dims.values()}
        few = {name for same in by_dims.values() for name in same[:_SAME_KIND]}
        chosen |= {name: _capped(tuple(params[name].shape), name in largest) for name in names if name in few}
    return chosen


def _capped(shape: tuple[int, ...], large: bool) -> tuple[int, ...]:
    most = _LARGEST[len(shape)] if large and len(shape) < len(_LARGEST) else (24, 16, *[2] * (len(shape) - 1))
    return tuple(map(min, shape, most))


def _hooks_of(optimizer: Any) -> list[Any]:
    """Return the user's hooks around the optimizer's steps."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return [hook for name in names for hook in vars(optimizer).get(name, {}).values()]


def _keyed(made: Any, real: Collection[int]) -> str:
    """Return the name of a mapping or set in which a step looks up a parameter or its id; "" if there is none.

    Such a lookup fails in a copy. real: the ids of the model's parameters.
    """
    functions = [made.step, *_hooks_of(made), *(each for kind in type(made).__mro__ for each in vars(kind).values())]
    functions = [unwrap(getattr(each, "__func__", each)) for each in functions]  # torch wraps `step`
    found = {f"self.{name}": (value, False) for name, value in vars(made).items()}
    for function in (each for each in functions if isinstance(each, FunctionType)):
        if not function.__module__.startswith("torch."):
            with suppress(ValueError):  # a cell that is not filled yet
                found |= {name: (value, True) for name, value in getclosurevars(function).nonlocals.items()}
            named = function.__globals__
            found |= {name: (named[name], True) for name in function.__code__.co_names if name in named}
    for name, (value, objects) in found.items():
        if isinstance(value, Mapping | Set) and any(
            each in real if type(each) is int else objects and id(each) in real for each in value
        ):
            return f"it looks them up in {name}"
    return ""


def _rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a learning rate for a group whose rate is still 0."""
    return {"lr": 0.1} if "lr" in group and not group["lr"] else {}


def _steps_for(optimizer: Any) -> int:
    settings = [*vars(optimizer).values(), *(value for group in optimizer.param_groups for value in group.values())]
    counts = [value + 2 for value in settings if type(value) is int and 1 < value <= _MOST_STEPS - 2]
    return max([_STEPS, *counts])


def _make_step(copy: Copy, grads: Mapping[str, Tensor], step: int) -> bool:
    """Make a step. Return True if step 1 drew random numbers. All copies draw the same numbers in a step."""
    optimizer, updated = copy
    for name, p, part in updated:
        p.grad = grads[name][part].clone()
    torch.default_generator.manual_seed(step)
    before = torch.default_generator.get_state() if step == 1 else None
    optimizer.step()
    return before is not None and not torch.equal(before, torch.default_generator.get_state())


def _apart(whole: Copy, others: Sequence[Copy], start: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (name, where and how far it differs) for each tensor that `others` have updated in another way."""
    of_way, of_weight = _TOLERANCE[start[next(iter(start))].dtype] if start else (0.0, 0.0)
    weights = {name: p.detach() for name, p, _ in whole[1]}
    way = {name: (weight - start[name]).abs().max().item() for name, weight in weights.items() if weight.numel()}
    for _, updated in others:
        for name, p, part in updated:
            if p.numel():
                differs = (weights[name][part] - p.detach()).abs().max().item()
                if not differs <= of_way * way[name] + of_weight * weights[name].abs().max().item():
                    tried = f"{name}, tried in the shape {tuple(weights[name].shape)},"
                    yield name, f"{tried} moved by {way[name]:.2g} and differs by {differs:.2g}"


@contextmanager
def _aside() -> Iterator[None]:
    """Protect the process inside: restore the random state afterwards, and raise OptimizerSends for a message."""
    state, own, threads = torch.get_rng_state(), get_ident(), torch.get_num_threads()

    def refuse(operation: str, group: str, _: int) -> None:
        if get_ident() == own:
            raise OptimizerSends(f"{operation} in {group}")

    delegating_group.listeners.append(refuse)
    torch.set_num_threads(1)  # waking threads takes longer than their work, 100 times longer on a busy machine
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        delegating_group.listeners.remove(refuse)
        torch.set_rng_state(state)
