"""Make an optimizer over what a rank holds, from the user's optimizer over the whole model.

Groups are those that the user's own code formed, by original names and global shapes, whatever part of a parameter is
here. An optimizer may hold parameters in more places than its groups: in optimizers within it, lists, dicts and
closures. A copy over other parameters has to find them all. `copy.deepcopy` does not: Optimizer drops attributes when
it is copied, and functions are never copied. `Rebinding` copies an object with everything that it refers to, and
replaces some of it. What a copy cannot follow is found by running copies on small tensors; see optimizer_trial.py.
"""

from __future__ import annotations

import copy
import enum
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbkit.errors import SwitchError, TrainingError
from nbkit.rank.train import argument_checks
from nbkit.rank.train.step.optimizer_mode import MODES, to_train
from nbkit.rank.train.step.optimizer_state import numbered, per_element, states_of
from nbkit.rank.train.step.optimizer_trial import Need, OptimizerTrial
from nbkit.rank.train.step.several_optimizers import Several, SeveralOptimizers, together
from nbkit.strategy import Strategy

T = TypeVar("T")

ABSENT: Any = object()
"""Replaces what the copy has to do without. Containers leave it out; elsewhere it becomes None."""

_AS_THEY_ARE = (
    *(bool, int, float, complex, str, bytes, type, ModuleType, enum.Enum),
    *(nn.Module, torch.distributed.ProcessGroup, torch.dtype, torch.device),
)


class Rebinding:
    """Copies values that may refer to each other. Models are not copied.

    memo: id of an object -> its replacement; it grows by the copies. meet: called with each new object; if it returns
    something else than None, that replaces the object.
    """

    def __init__(self, memo: dict[int, Any], meet: Callable[[Any], Any] | None = None) -> None:
        self._memo, self._meet = memo, meet
        self._alive: list[Any] = []  # an id is valid only as long as its object lives

    def copy(self, value: Any) -> Any:
        """Return the replacement of `value`: a copy, itself, or ABSENT."""
        if value is None or value is ABSENT or isinstance(value, _AS_THEY_ARE):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._alive.append(value)
        found = None if self._meet is None else self._meet(value)
        if found is None:
            found = self._copied(value)
        return self._memo.setdefault(id(value), found)

    def attribute(self, value: Any) -> Any:
        """Return a copy of `value`; None if it is absent."""
        new = self.copy(value)
        return None if new is ABSENT else new

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy.deepcopy(value) if value.is_leaf else value.detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, dict | list | deque | set):
            return self._filled(value)
        if isinstance(value, tuple | frozenset):
            items = [new for item in value if (new := self.copy(item)) is not ABSENT]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, FunctionType):
            return self._function(value) if value.__closure__ else value
        if isinstance(value, MethodType):
            return MethodType(self.attribute(value.__func__), self.attribute(value.__self__))
        if isinstance(value, partial):
            words = {name: self.attribute(each) for name, each in value.keywords.items()}
            return partial(self.attribute(value.func), *map(self.attribute, value.args), **words)
        return self._object(value)

    def _filled(self, value: Any) -> Any:
        new = self._memo[id(value)] = copy.copy(value)
        new.clear()
        if isinstance(value, dict):
            for name, item in value.items():
                key, own = self.copy(name), self.copy(item)
                if key is not ABSENT and own is not ABSENT:
                    new[key] = own
            return new
        put = new.add if isinstance(value, set) else new.append
        for item in value:
            if (own := self.copy(item)) is not ABSENT:
                put(own)
        return new

    def _function(self, value: FunctionType) -> FunctionType:
        """Return a copy of a function with its own closure variables. It may refer to itself."""
        assert value.__closure__ is not None
        cells, to_fill = [], []
        for cell in value.__closure__:
            if id(cell) not in self._memo:
                self._memo[id(cell)] = CellType()
                self._alive.append(cell)
                to_fill.append(cell)
            cells.append(self._memo[id(cell)])
        new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        new.__dict__.update(value.__dict__)
        self._memo[id(value)] = new
        for cell in to_fill:
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._memo[id(cell)].cell_contents = self.attribute(held)
        return new

    def _object(self, value: Any) -> Any:
        kind = type(value)
        own_way = any(name in base.__dict__ for base in kind.__mro__[:-1] for name in ("__deepcopy__", "__reduce__"))
        try:
            if own_way or not hasattr(value, "__dict__"):
                return copy.deepcopy(value, self._memo)
            new = self._memo[id(value)] = object.__new__(kind)
        except Exception:  # locks, files, groups of processes: a copy shares them
            return value
        for base in kind.__mro__:
            for name in base.__dict__.get("__slots__", ()):
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    object.__setattr__(new, name, self.attribute(getattr(value, name)))
        new.__dict__.update({name: self.attribute(each) for name, each in vars(value).items()})
        return new


_ON_CPU = {"capturable": False, "fused": None}


@dataclass(frozen=True)
class _Mark:
    """Stands for an object in the parts of an optimizer. of: the name of a parameter, or the number of an optimizer."""

    kind: Literal["parameter", "optimizer", "state"]
    of: str | int


class _Part(NamedTuple):
    """An optimizer in parts.

    kind: its class. refer: its attributes that refer to parameters, with marks in their place. others: the other ones.
    """

    kind: type
    refer: dict[str, Any]
    others: dict[str, Any]


class OptimizerSpec:
    """The names of the parameters in each group, and everything else that an optimizer holds."""

    def __init__(
        self,
        optimizer: Optimizer | Several | Callable[[nn.Module], Optimizer | Several],
        *,
        module: nn.Module,
    ) -> None:
        """optimizer: a callable given `module`, or an optimizer of its parameters, or a list or dict of several.

        Raises TrainingError if it is no optimizer, holds other tensors than the model's, or cannot be copied. For
        several see `together`.
        """
        given = optimizer if isinstance(optimizer, Optimizer | Sequence | Mapping) else _made_by(optimizer, module)
        made = together(given, module)
        argument_checks.check_optimizer(made, module)
        names = {id(p): name for name, p in module.named_parameters()}
        self.name = _named(made)
        self.groups = [tuple(names[id(p)] for p in group["params"]) for group in made.param_groups]
        self._parts, optimizers = _taken_apart(made, names)
        # The state of an optimizer that has trained before, by parameter.
        self.state: dict[str, dict[str, Any]] = {}
        for number, state in enumerate(states_of(made, optimizers)):
            for p, held in state.items():
                if id(p) in names:
                    self.state.setdefault(names[id(p)], {}).update({numbered(number, key): held[key] for key in held})
        self._made = _with_each(made)
        self._begin()
        params = dict(module.named_parameters())
        self._sizes = {name: (params[name].ndim, params[name].nbytes) for group in self.groups for name in group}
        self._trial = OptimizerTrial(self.name, self.groups, params, self._small)
        self._trial.check(made, module.parameters())

    def _begin(self) -> None:
        self._names: WeakKeyDictionary[Optimizer, dict[int, str]] = WeakKeyDictionary()
        self._tried = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the kind of optimizer and its settings, without parameters, for a process that joins the training."""
        return {name: value for name, value in vars(self).items() if name not in ("_made", "_names", "_tried", "state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.state, self._made = {}, []
        self._begin()
        self._trial.build = self._small

    def build(self, held: Mapping[str, nn.Parameter], like: Optimizer | None = None) -> Any:
        """Return an optimizer over `held`, without state.

        like: take settings and attributes from this one, not from the first. Raises TrainingError if it has got more
        groups.
        """
        if like is not None and len(like.param_groups) != len(self.groups):
            raise TrainingError(
                "The optimizer has got parameter groups since the job was built, which a switch cannot follow.",
                numbers=f"{len(like.param_groups)} groups, {len(self.groups)} at the start",
                hint="all groups in the optimizer's factory, frozen parameters included",
            )
        optimizer = _assembled(self._parts if like is None else self._parts_like(like), held)
        self._names[optimizer] = {id(p): name for name, p in held.items()}
        return optimizer

    def _parts_like(self, like: Optimizer) -> list[_Part]:
        """Return the parts, with settings and attributes of `like`. What refers to parameters stays as it was made."""
        now, _ = _taken_apart(like, self._names.get(like, {}))
        if [part.kind for part in now] != [part.kind for part in self._parts]:
            now = now[:1]  # it has got another optimizer within it since
        copies = _with_marks(lambda mark: mark)
        parts = [part._replace(refer=copies.copy(part.refer)) for part in self._parts]
        for place, (part, given) in enumerate(zip(parts, now, strict=False)):
            groups = part.refer.get("param_groups", ()), given.refer.get("param_groups", ())
            for group, settings in zip(*groups, strict=False):
                group.update({key: value for key, value in settings.items() if key != "params"})
            since = {name: value for name, value in given.refer.items() if name not in part.refer}
            others = {**part.others, **{name: v for name, v in given.others.items() if name not in part.refer}}
            parts[place] = part._replace(refer={**part.refer, **since}, others=others)
        return parts

    def groups_of(self, optimizer: Optimizer, held: Mapping[str, nn.Parameter]) -> list[list[str]]:
        """Return the names of the parameters in each group of `optimizer`, groups added later included."""
        names = {id(p): name for name, p in held.items()}
        added = optimizer.param_groups[len(self.groups) :]
        found = [[names[id(p)] for p in group["params"] if id(p) in names] for group in added]
        return [list(group) for group in self.groups] + found

    def follow(self, inner: Optimizer) -> None:
        """Let the optimizer that was given show `inner`, which is in force.

        It lives as long as its user holds it, and would otherwise keep the whole model, and two moments of it, in
        memory. An LR scheduler that its user puts on it, now or before, changes the groups in force, and sees the
        steps.
        """
        self.state.clear()
        for made, shown in zip(self._made, _with_each(inner), strict=False):
            scheduled = vars(made).get("step")
            made.__dict__ = shown.__dict__
            if hasattr(scheduled, "_wrapped_by_lr_sched"):
                made.__dict__.setdefault("step", scheduled)

    def needs(self) -> dict[str, Need]:
        """Return parameter -> what its update has to see at once. This is found by running copies on small tensors.

        A parameter needs what tensors of its group with as many dims need.
        """
        with self._tried:
            return self._like_tried(self._trial.needs())

    def whole(self, cut: str) -> frozenset[str]:
        """Return the parameters that one rank has to update whole where a strategy cuts them.

        cut: "rows", or "columns" for rows and columns.
        """
        with self._tried:
            return frozenset(self._like_tried(dict.fromkeys(self._trial.owned(cut), True)))

    def check(self, strategy: Strategy) -> None:
        """Raise TrainingError if ranks of `strategy` would not update what they hold as one process does.

        This is tried on small tensors: parts of them are updated beside the whole.
        """
        for kind in self._cuts(strategy):
            with self._tried:
                self._trial.check_parts(kind, str(strategy), self._cost)

    def _cuts(self, *strategies: Strategy) -> list[str]:
        """Return how the strategies cut tensors; see OptimizerTrial.lost_in_a_switch."""
        columns = any(strategy.tp > 1 for strategy in strategies)
        rows = not columns and any(strategy.zero or strategy.ep > 1 for strategy in strategies)
        stages = any(strategy.pp > 1 or strategy.ep > 1 for strategy in strategies)
        cuts = ["columns"] * columns + ["rows"] * rows
        with self._tried:
            owned = [f"{cut} and owners" if self._trial.owned(cut) else cut for cut in cuts]
        return owned + ["tensors"] * stages

    def _like_tried(self, found: Mapping[str, T]) -> dict[str, T]:
        """Return `found`, which is of the tensors that were tried, for all parameters that are like them."""
        every: dict[str, T] = {}
        for names in self.groups:
            by_dims = {self._sizes[name][0]: found[name] for name in names if name in found}
            every |= {name: by_dims[dims] for name in names if (dims := self._sizes[name][0]) in by_dims}
        return every

    def _cost(self) -> str:
        """Return what it would take in a step to make the updates that no strategy can cut, in words."""
        needs = self._like_tried(self._trial.needs())
        size = sum(self._sizes[name][1] for name, need in needs.items() if need > Need.ROW) / 1e6
        what = {Need.GROUP: "all tensors of a group together", Need.ALL: "all parameters together"}
        needed = what.get(max(needs.values()), "whole tensors")
        state = ""
        with suppress(Exception):  # whatever it wants of real parameters
            kept = size * sum(self._kept_by(self._firsts[0]).values()) / 4  # it was tried in float32
            state = f", keep {kept:.3g} MB of state"
        return (
            f"; it needs {needed}: in each step one rank would get {size:.3g} MB of gradients{state}, and send "
            f"{size:.3g} MB of weights, while the others wait"
        )

    def check_moves(self, old: Strategy, new: Strategy) -> None:
        """Raise SwitchError if what the optimizer remembers under `old` cannot all be taken along to `new`.

        Raises TrainingError as `check` does.
        """
        self.check(new)
        with self._tried:
            lost = self._trial.lost_in_a_switch(self._cuts(old, new))
        if lost:
            raise SwitchError(
                f"A switch to {new} would not take along all that {self.name} remembers under {old}.",
                numbers=lost,
                hint="state[p] of each parameter, as AdamW keeps it: tensors of its shape, and numbers",
            )

    def check_saves(self, strategy: Strategy) -> None:
        """Raise TrainingError if a checkpoint would lack something that the optimizer remembers."""
        if lost := self.lost(strategy):
            raise TrainingError(
                f"A checkpoint would not hold all that {self.name} remembers, and what goes on from it would train "
                "otherwise.",
                numbers=lost,
                hint="torch.save(trainer.full_state_dict(), 'model.pt') for the weights alone; or an optimizer that "
                "remembers in state[p], in its groups, and in attributes that are numbers",
            )

    def lost(self, strategy: Strategy) -> str:
        """Return evidence that a checkpoint under `strategy` would lack something that it remembers; "" if not.

        The same holds for a process that takes the place of another.
        """
        with self._tried:
            return self._trial.lost_in_a_checkpoint(self._cuts(strategy))

    def check_rate(self) -> None:
        """Raise TrainingError if the learning rate of its groups has no effect."""
        with self._tried:
            taken = self._trial.takes_rate()
        if not taken:
            raise TrainingError(
                f"{self.name} does not take the learning rate of the groups that it shows: to set it changes nothing.",
                numbers=f"{len(self.groups)} groups; copies with twice the rate made the same steps",
                hint="in its __init__: self.param_groups = [group for one in optimizers for group in one.param_groups]",
            )

    @property
    def draws(self) -> bool:
        """Return True if its steps draw random numbers."""
        return self._trial.draws

    def is_adaptive(self) -> bool:
        """Return True if gradients ten times as large hardly make larger steps, as in Adam, in any of its groups.

        Tried on a small matrix.
        """
        torch_state = torch.get_rng_state()
        grad = torch.linspace(1.0, 2.0, 24).reshape(4, 6)
        try:
            steps = [[self._one_step(name, grad * times) for times in (1, 10)] for name in self._firsts]
        except Exception:  # whatever an optimizer wants of real parameters
            return False
        finally:
            torch.set_rng_state(torch_state)
        return any(0 < small and large < 2 * small for small, large in steps)

    def _one_step(self, name: str, grad: torch.Tensor) -> float:
        """Return how far one step goes from zero, with the settings of the group of `name`."""
        weight = nn.Parameter(torch.zeros_like(grad))
        settings = {"weight_decay": 0.0}
        optimizer = self._small({name: weight}, lambda group: {**settings, "lr": group.get("lr") or 0.1})
        weight.grad = grad
        optimizer.step()
        return float(weight.detach().norm())

    @property
    def _firsts(self) -> list[str]:
        """The first parameter of each group."""
        return [names[0] for names in self.groups if names]

    def kinds(self, model: nn.Module) -> dict[str, dict[str, int]]:
        """Return what job_state.bytes_per_element does, before the first step.

        It is found by a step of a small optimizer.
        """
        keys = {name: found for names in self.groups if names for found in [self._kept_by(names[0])] for name in names}
        return {
            name: {"weight": p.element_size()} | (keys.get(name, {}) if p.requires_grad else {})
            for name, p in model.named_parameters()
        }

    @property
    def keys_per_element(self) -> set[str]:
        """Return the keys of what it remembers of each element; none if that cannot be tried."""
        try:
            return {key for name in self._firsts for key in self._kept_by(name)}
        except Exception:  # whatever it wants of real parameters
            return set()

    def _kept_by(self, name: str) -> dict[str, int]:
        """Return the keys of what the group of `name` remembers of each element, with the bytes of each."""
        weight = nn.Parameter(torch.zeros(4, 6))
        small = self._small({name: weight}, lambda group: {})
        weight.grad = torch.zeros_like(weight)
        small.step()
        return {key: value.element_size() for key, value in per_element(small, weight).items()}

    def over(self, params: list[nn.Parameter]) -> Any:
        """Return an optimizer of this kind, with its first group's settings, over other parameters on the CPU."""
        optimizer = self._small({self._firsts[0]: params[0]}, lambda group: {})
        for groups in _group_lists(optimizer):
            groups[:] = [{**group, "params": list(params)} for group in groups if group["params"]]
        return optimizer

    def on_cpu(self, held: Mapping[str, nn.Parameter], plainly: bool) -> Any:
        """Return an optimizer as `build` does, over tensors on the CPU, for a step of a proof.

        plainly: update tensors one after the other. The largest learning rate becomes 0.1, so that no update is lost
        where weights are rounded.
        """
        largest = max(float(group.get("lr") or 0) for group in _group_settings(self._parts))

        def settings(group: Mapping[str, Any]) -> dict[str, Any]:
            own: dict[str, Any] = {"foreach": False} if plainly and "foreach" in group else {}
            if "lr" in group:
                own["lr"] = 0.1 * float(group["lr"]) / largest if largest else 0.1
            return own

        return self._small(held, settings, whole=True)

    def _small(
        self,
        held: Mapping[str, nn.Parameter],
        settings: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        *,
        like: Optimizer | None = None,
        whole: bool = False,
        hooks: bool = False,
    ) -> Any:
        """Return an optimizer as `build` does, for steps outside of the training. It has its own counters.

        settings: what to change in a group. whole: keep groups of which `held` has nothing. hooks: call those that its
        user has put on it.
        """
        optimizer = _assembled(self._parts if like is None else self._parts_like(like), held, shares=False)
        for each in [] if hooks else [optimizer, *vars(optimizer).get("_within", ())]:
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                vars(each).get(name, {}).clear()
        for groups in _group_lists(optimizer):
            for group in groups:
                group.update({key: value for key, value in _ON_CPU.items() if key in group} | dict(settings(group)))
                if isinstance(rate := group.get("lr"), torch.Tensor):
                    group["lr"] = rate.to(next(iter(held.values())).device) if held else rate
            if not whole:
                groups[:] = [group for group in groups if group["params"]] or groups[:1]
        if like is None:
            to_train(optimizer)
        self._names[optimizer] = {id(p): name for name, p in held.items()}
        return optimizer


def _made_by(factory: Callable[[nn.Module], Optimizer | Several], model: nn.Module) -> Optimizer | Several:
    try:
        return factory(model)
    except TypeError as error:
        if isinstance(factory, type) and issubclass(factory, Optimizer):
            name = f"{'torch.optim.' * hasattr(torch.optim, factory.__name__)}{factory.__name__}"
            raise TrainingError(
                f"optimizer= is called with the model, and {factory.__name__} wants its parameters.",
                numbers=f"{factory.__name__}({type(model).__name__}): {error}",
                hint=f"optimizer=lambda model: {name}(model.parameters(), lr=1e-3)",
            ) from error
        raise


def _with_each(optimizer: Optimizer) -> list[Optimizer]:
    """Return `optimizer`, and those that it stands for."""
    return [optimizer, *(optimizer.each if isinstance(optimizer, SeveralOptimizers) else [])]


def _named(made: Optimizer) -> str:
    """Return the name of its class, and attributes that were set on the object. Join the names of several."""
    if isinstance(made, SeveralOptimizers):
        return " + ".join(map(_named, made.each))
    name, held = type(made).__name__, vars(made)
    if "step" in held and not _is_ours("step", held["step"]):
        name += " with another step"
    if any(held.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        name += " with hooks"
    return name


def _taken_apart(made: Optimizer, names: Mapping[int, str]) -> tuple[list[_Part], list[Optimizer]]:
    """Return the parts of `made` and of the optimizers within it, and these optimizers. names: by id of a parameter."""
    found: list[Optimizer] = []
    memo: dict[int, Any] = {key: _Mark("parameter", name) for key, name in names.items()}

    def meet(value: Any) -> Any:
        if not isinstance(value, Optimizer):
            return None
        found.append(value)
        if "state" in vars(value):
            memo.setdefault(id(value.state), _Mark("state", len(found) - 1))
        return _Mark("optimizer", len(found) - 1)

    copies = Rebinding(memo, meet)
    copies.copy(made)
    parts: list[_Part] = []
    while len(parts) < len(found):
        one = found[len(parts)]
        part = _Part(type(one), {}, {})
        for name, value in vars(one).items():
            if not _is_ours(name, value):
                own = copies.attribute(value)
                # What refers to no parameter is not copied: its user may hold it too, such as a list that grows.
                refers = name == "param_groups" or _refers(own)
                (part.refer if refers else part.others)[name] = own if refers else value
        parts.append(part)
    return parts, found


def _is_ours(name: str, value: Any) -> bool:
    """Return True if this library, or an LR scheduler, put an attribute on that very optimizer."""
    if name not in ("step", *MODES):
        return name in ("_within", "state_device")
    made = value.func if isinstance(value, partial) else value
    return hasattr(value, "_wrapped_by_lr_sched") or str(getattr(made, "__module__", "")).startswith("nbkit.")


def _assembled(parts: Sequence[_Part], held: Mapping[str, nn.Parameter], *, shares: bool = True) -> Any:
    """Return an optimizer made of `parts` over `held`. Other parameters in the parts are left out.

    shares: share what refers to no parameter with the parts.
    """
    optimizers: list[Any] = [object.__new__(part.kind) for part in parts]
    states: list[Any] = [defaultdict(dict) for _ in parts]

    def found(mark: _Mark) -> Any:
        if isinstance(mark.of, str):
            return held.get(mark.of, ABSENT)
        return (optimizers if mark.kind == "optimizer" else states)[mark.of]

    copies = _with_marks(found)
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.__dict__.update({name: copies.attribute(value) for name, value in part.refer.items()})
        for name, value in part.others.items():
            # It has its own hooks, and its own counters that change in place.
            copied = not shares or isinstance(value, OrderedDict | torch.Tensor)
            optimizer.__dict__[name] = copies.attribute(value) if copied else value
    if len(optimizers) > 1:
        optimizers[0].__dict__["_within"] = tuple(optimizers[1:])
    return optimizers[0]


def _with_marks(found: Callable[[_Mark], Any]) -> Rebinding:
    return Rebinding({}, lambda value: found(value) if isinstance(value, _Mark) else None)


def _refers(value: Any) -> bool:
    """Return True if there is a mark in an attribute of a part."""
    seen: list[_Mark] = []

    def see(mark: _Mark) -> _Mark:
        seen.append(mark)
        return mark

    _with_marks(see).copy(value)
    return bool(seen)


def _group_lists(optimizer: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the groups of an optimizer and of those within it, each list once."""
    every = [optimizer, *vars(optimizer).get("_within", ())]
    yield from {id(each.param_groups): each.param_groups for each in every}.values()


def _group_settings(parts: Iterable[_Part]) -> list[dict[str, Any]]:
    return [group for part in parts for group in part.refer.get("param_groups", ())]
