"""Make an optimizer over this rank's parameters, from the user's optimizer over the whole model.

The parameter groups are the ones that the user's code formed from original names and global shapes. They do not depend
on which part of a parameter this rank holds. An optimizer may refer to parameters outside of its groups: in inner
optimizers, lists, dicts and closures. A copy over other parameters has to replace all of these references.
`copy.deepcopy` does not: Optimizer drops attributes when it is copied, and functions are never copied. `Rebinding`
copies an object with everything that it refers to, and replaces some of it. Running copies on small tensors shows
whether a copy behaves like the original; see optimizer_trial.py.
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
"""Replaces a value that the copy does not get. Containers leave it out; elsewhere it becomes None."""

_AS_THEY_ARE = (
    *(bool, int, float, complex, str, bytes, type, ModuleType, enum.Enum),
    *(nn.Module, torch.distributed.ProcessGroup, torch.dtype, torch.device),
)


class Rebinding:
    """Copies values that may refer to each other. Models are not copied.

    memo: id of an object -> its replacement; every copy is added to it. meet: called with each new object. A result
    that is not None replaces the object.
    """

    def __init__(self, memo: dict[int, Any], meet: Callable[[Any], Any] | None = None) -> None:
        self._memo, self._meet = memo, meet
        self._alive: list[Any] = []  # keep the objects: an id is valid only while its object exists

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
        """Return the replacement of `value`, with None for ABSENT."""
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
        """Return a copy of a function with its own closure variables. The function may refer to itself."""
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
        except Exception:  # for example locks, files and process groups: the copy shares them
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
    """A placeholder for an object in a _Part. of: the name of a parameter, or the index of an optimizer."""

    kind: Literal["parameter", "optimizer", "state"]
    of: str | int


class _Part(NamedTuple):
    """The class and the attributes of one optimizer.

    refer: the attributes that refer to parameters, with a _Mark in place of each parameter. others: all others.
    """

    kind: type
    refer: dict[str, Any]
    others: dict[str, Any]


class OptimizerSpec:
    """A description of an optimizer, from which it can be built over other parameters.

    groups: the names of the parameters in each parameter group.
    """

    def __init__(
        self,
        optimizer: Optimizer | Several | Callable[[nn.Module], Optimizer | Several],
        *,
        module: nn.Module,
    ) -> None:
        """optimizer: an optimizer, a list or dict of several, or a callable that takes `module` and returns these.

        Raises TrainingError if it is not an optimizer, has tensors that are not the model's, or cannot be copied. For
        several optimizers see `together`.
        """
        given = optimizer if isinstance(optimizer, Optimizer | Sequence | Mapping) else _made_by(optimizer, module)
        made = together(given, module)
        argument_checks.check_optimizer(made, module)
        names = {id(p): name for name, p in module.named_parameters()}
        self.name = _named(made)
        self.groups = [tuple(names[id(p)] for p in group["params"]) for group in made.param_groups]
        self._parts, optimizers = _taken_apart(made, names)
        # Parameter -> state, if the optimizer has trained before.
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
        """Return the class and settings, without parameters, for a process that joins the training."""
        return {name: value for name, value in vars(self).items() if name not in ("_made", "_names", "_tried", "state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.state, self._made = {}, []
        self._begin()
        self._trial.build = self._small

    def build(self, held: Mapping[str, nn.Parameter], like: Optimizer | None = None) -> Any:
        """Return an optimizer over `held`, without state.

        like: copy settings and attributes from this optimizer instead of the original one. Raises TrainingError if it
        has another number of groups.
        """
        if like is not None and len(like.param_groups) != len(self.groups):
            raise TrainingError(
                "The optimizer got parameter groups after the job was built, and a switch cannot handle them.",
                numbers=f"{len(like.param_groups)} groups, {len(self.groups)} at the start",
                hint="put all groups into optimizer=..., also those of frozen parameters",
            )
        optimizer = _assembled(self._parts if like is None else self._parts_like(like), held)
        self._names[optimizer] = {id(p): name for name, p in held.items()}
        return optimizer

    def _parts_like(self, like: Optimizer) -> list[_Part]:
        """Return the parts, with settings and attributes of `like`. References to parameters stay the original ones."""
        now, _ = _taken_apart(like, self._names.get(like, {}))
        if [part.kind for part in now] != [part.kind for part in self._parts]:
            now = now[:1]  # its inner optimizers have changed since
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
        """Return the names of the parameters in each group of `optimizer`, including groups that were added later."""
        names = {id(p): name for name, p in held.items()}
        added = optimizer.param_groups[len(self.groups) :]
        found = [[names[id(p)] for p in group["params"] if id(p) in names] for group in added]
        return [list(group) for group in self.groups] + found

    def follow(self, inner: Optimizer) -> None:
        """Make the user's optimizer object share the attributes of `inner`, the optimizer in force.

        Otherwise it would keep the whole model and its moments in memory as long as the user keeps the object. An LR
        scheduler on the user's object, added earlier or later, then changes the groups in force and notices the steps.
        """
        self.state.clear()
        for made, shown in zip(self._made, _with_each(inner), strict=False):
            scheduled = vars(made).get("step")
            made.__dict__ = shown.__dict__
            if hasattr(scheduled, "_wrapped_by_lr_sched"):
                made.__dict__.setdefault("step", scheduled)

    def needs(self) -> dict[str, Need]:
        """Return parameter name -> the part of the model that its update has to see at once.

        Copies of the optimizer are run on small tensors to find it. Parameters of the same group with the same number
        of dimensions need the same.
        """
        with self._tried:
            return self._like_tried(self._trial.needs())

    def whole(self, cut: str) -> frozenset[str]:
        """Return the names of parameters that one rank has to update as a whole, although a strategy splits them.

        cut: "rows", or "columns" for rows and columns.
        """
        with self._tried:
            return frozenset(self._like_tried(dict.fromkeys(self._trial.owned(cut), True)))

    def check(self, strategy: Strategy) -> None:
        """Raise TrainingError if ranks under `strategy` would update parameters in another way than one process.

        This is tried on small tensors: updates of their parts are compared with an update of the whole.
        """
        for kind in self._cuts(strategy):
            with self._tried:
                self._trial.check_parts(kind, str(strategy), self._cost)

    def _cuts(self, *strategies: Strategy) -> list[str]:
        """Return the ways in which the strategies split tensors; see OptimizerTrial.lost_in_a_switch."""
        columns = any(strategy.tp > 1 for strategy in strategies)
        rows = not columns and any(strategy.zero or strategy.ep > 1 for strategy in strategies)
        stages = any(strategy.pp > 1 or strategy.ep > 1 for strategy in strategies)
        cuts = ["columns"] * columns + ["rows"] * rows
        with self._tried:
            owned = [f"{cut} and owners" if self._trial.owned(cut) else cut for cut in cuts]
        return owned + ["tensors"] * stages

    def _like_tried(self, found: Mapping[str, T]) -> dict[str, T]:
        """Extend `found` from the tensors that were tried to all parameters of the same group and number of dims."""
        every: dict[str, T] = {}
        for names in self.groups:
            by_dims = {self._sizes[name][0]: found[name] for name in names if name in found}
            every |= {name: by_dims[dims] for name in names if (dims := self._sizes[name][0]) in by_dims}
        return every

    def _cost(self) -> str:
        """Return the cost per step of the updates that no strategy can split, in words."""
        needs = self._like_tried(self._trial.needs())
        size = sum(self._sizes[name][1] for name, need in needs.items() if need > Need.ROW) / 1e6
        what = {Need.GROUP: "all tensors of a group together", Need.ALL: "all parameters together"}
        needed = what.get(max(needs.values()), "whole tensors")
        state = ""
        with suppress(Exception):  # the optimizer may need real parameters
            kept = size * sum(self._kept_by(self._firsts[0]).values()) / 4  # it was tried in float32
            state = f", keep {kept:.3g} MB of state"
        return (
            f"; it needs {needed}: if one rank updated them, it would get {size:.3g} MB of gradients in each "
            f"step{state}, and send {size:.3g} MB of weights, while the others wait"
        )

    def check_moves(self, old: Strategy, new: Strategy) -> None:
        """Raise SwitchError if a switch from `old` to `new` would lose state of the optimizer.

        Raises TrainingError as `check` does.
        """
        self.check(new)
        with self._tried:
            lost = self._trial.lost_in_a_switch(self._cuts(old, new))
        if lost:
            raise SwitchError(
                f"A switch to {new} would lose a part of the state that {self.name} has under {old}.",
                numbers=lost,
                hint="keep state as AdamW does, in state[p] of each parameter: tensors of its shape, and numbers",
            )

    def check_saves(self, strategy: Strategy) -> None:
        """Raise TrainingError if a checkpoint would not contain all state of the optimizer."""
        if lost := self.lost(strategy):
            raise TrainingError(
                f"A checkpoint would not hold the whole state of {self.name}, so a training that loads it would give "
                "different results.",
                numbers=lost,
                hint="torch.save(trainer.full_state_dict(), 'model.pt') for the weights alone; or an optimizer that "
                "keeps its state in state[p], in its groups, and in attributes that are numbers",
            )

    def lost(self, strategy: Strategy) -> str:
        """Return the evidence that a checkpoint under `strategy` would not contain all state; "" if there is none.

        A process that replaces another would lack the same state.
        """
        with self._tried:
            return self._trial.lost_in_a_checkpoint(self._cuts(strategy))

    def check_rate(self) -> None:
        """Raise TrainingError if a change of "lr" in the optimizer's groups has no effect."""
        with self._tried:
            taken = self._trial.takes_rate()
        if not taken:
            raise TrainingError(
                f"{self.name} ignores the learning rate of its groups, so a change of it has no effect.",
                numbers=f"{len(self.groups)} groups; copies with twice the rate made the same steps",
                hint="in its __init__: self.param_groups = [group for one in optimizers for group in one.param_groups]",
            )

    @property
    def draws(self) -> bool:
        """Return True if the optimizer's steps draw random numbers."""
        return self._trial.draws

    def is_adaptive(self) -> bool:
        """Return True if gradients that are ten times larger make steps less than twice as large, as in Adam.

        This is tried on a small matrix for each group. One such group is enough.
        """
        torch_state = torch.get_rng_state()
        grad = torch.linspace(1.0, 2.0, 24).reshape(4, 6)
        try:
            steps = [[self._one_step(name, grad * times) for times in (1, 10)] for name in self._firsts]
        except Exception:  # the optimizer may need real parameters
            return False
        finally:
            torch.set_rng_state(torch_state)
        return any(0 < small and large < 2 * small for small, large in steps)

    def _one_step(self, name: str, grad: torch.Tensor) -> float:
        """Return the 2-norm of a weight that was zero before one step, with the settings of the group of `name`."""
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
        """Return the result of job_state.bytes_per_element already before the first step.

        A step of a small optimizer shows it.
        """
        keys = {name: found for names in self.groups if names for found in [self._kept_by(names[0])] for name in names}
        return {
            name: {"weight": p.element_size()} | (keys.get(name, {}) if p.requires_grad else {})
            for name, p in model.named_parameters()
        }

    @property
    def keys_per_element(self) -> set[str]:
        """Return the keys of the state that is kept per element; an empty set if that cannot be tried."""
        try:
            return {key for name in self._firsts for key in self._kept_by(name)}
        except Exception:  # the optimizer may need real parameters
            return set()

    def _kept_by(self, name: str) -> dict[str, int]:
        """Return key -> bytes per element, for the state that the group of `name` keeps per element."""
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

        plainly: update tensors one after the other. All learning rates are scaled so that the largest is 0.1.
        Otherwise rounding of the weights could hide an update.
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

        settings: takes a group and returns the settings to change in it. whole: keep groups that have no parameter in
        `held`. hooks: keep the user's step hooks.
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
                f"optimizer= is called with the model, but {factory.__name__} needs its parameters.",
                numbers=f"{factory.__name__}({type(model).__name__}): {error}",
                hint=f"optimizer=lambda model: {name}(model.parameters(), lr=1e-3)",
            ) from error
        raise


def _with_each(optimizer: Optimizer) -> list[Optimizer]:
    """Return `optimizer`, followed by its members if it combines several."""
    return [optimizer, *(optimizer.each if isinstance(optimizer, SeveralOptimizers) else [])]


def _named(made: Optimizer) -> str:
    """Return the class name, and mention a replaced `step` or hooks. Join the names of several."""
    if isinstance(made, SeveralOptimizers):
        return " + ".join(map(_named, made.each))
    name, held = type(made).__name__, vars(made)
    if "step" in held and not _is_ours("step", held["step"]):
        name += " with another step"
    if any(held.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        name += " with hooks"
    return name


def _taken_apart(made: Optimizer, names: Mapping[int, str]) -> tuple[list[_Part], list[Optimizer]]:
    """Return the parts of `made` and of its inner optimizers, and these optimizers. names: id of parameter -> name."""
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
                # A value that refers to no parameter is not copied. The user may share it, such as a list that grows.
                refers = name == "param_groups" or _refers(own)
                (part.refer if refers else part.others)[name] = own if refers else value
        parts.append(part)
    return parts, found


def _is_ours(name: str, value: Any) -> bool:
    """Return True if nbkit or an LR scheduler has set this attribute on the optimizer object."""
    if name not in ("step", *MODES):
        return name in ("_within", "state_device")
    made = value.func if isinstance(value, partial) else value
    return hasattr(value, "_wrapped_by_lr_sched") or str(getattr(made, "__module__", "")).startswith("nbkit.")


def _assembled(parts: Sequence[_Part], held: Mapping[str, nn.Parameter], *, shares: bool = True) -> Any:
    """Return an optimizer made of `parts` over `held`. It leaves out parameters that are not in `held`.

    shares: do not copy values that refer to no parameter.
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
            # Always copy hooks, and counters that change in place.
            copied = not shares or isinstance(value, OrderedDict | torch.Tensor)
            optimizer.__dict__[name] = copies.attribute(value) if copied else value
    if len(optimizers) > 1:
        optimizers[0].__dict__["_within"] = tuple(optimizers[1:])
    return optimizers[0]


def _with_marks(found: Callable[[_Mark], Any]) -> Rebinding:
    return Rebinding({}, lambda value: found(value) if isinstance(value, _Mark) else None)


def _refers(value: Any) -> bool:
    """Return True if `value` contains a _Mark."""
    seen: list[_Mark] = []

    def see(mark: _Mark) -> _Mark:
        seen.append(mark)
        return mark

    _with_marks(see).copy(value)
    return bool(seen)


def _group_lists(optimizer: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the `param_groups` of an optimizer and of its inner optimizers, each list once."""
    every = [optimizer, *vars(optimizer).get("_within", ())]
    yield from {id(each.param_groups): each.param_groups for each in every}.values()


def _group_settings(parts: Iterable[_Part]) -> list[dict[str, Any]]:
    return [group for part in parts for group in part.refer.get("param_groups", ())]
