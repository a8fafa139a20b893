"""The user's optimizer, made once over the whole model's shapes; from it, one over what a rank holds.

Groups are those the user's own code formed, by original names and global shapes, whatever part of a parameter is here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.train import argument_checks

_ON_CPU = {"capturable": False, "fused": None}


class Template:
    """Which parameter is in which group, by name, and everything else that the optimizer holds."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
        *,
        module: nn.Module,
        skeleton: nn.Module,
    ) -> None:
        """optimizer: a callable given the skeleton, or an optimizer of `module`'s parameters.

        Raises TrainingError when it is no optimizer, or holds other tensors than the model's.
        """
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made_by(optimizer, skeleton)
        argument_checks.check_optimizer(made, module, skeleton)
        if hasattr(getattr(made, "step", None), "_wrapped_by_lr_sched"):
            raise TrainingError(
                "An LR scheduler is on the optimizer already; it would change a learning rate that nobody uses.",
                numbers=f"{type(made).__name__}, with {len(made.param_groups)} groups",
                hint="LambdaLR(job.optimizer, ...) after nbkit.prepare; or lr_schedule= of the Trainer",
            )
        names = {id(p): name for model in (module, skeleton) for name, p in model.named_parameters()}
        self.groups = [tuple(names[id(p)] for p in group["params"]) for group in made.param_groups]
        # What an optimizer that trained before remembers, by parameter.
        self.state = {names[id(p)]: dict(held) for p, held in made.state.items() if id(p) in names}
        self._made = made

    def __getstate__(self) -> dict[str, Any]:
        """For a process that joins the training: the kind of optimizer and its settings, without parameters."""
        empty: list[list[nn.Parameter]] = [[] for _ in self.groups]
        bare = _clone(self._made, self._made.param_groups[: len(self.groups)], empty)
        # By hand: pickling one keeps only what Optimizer itself knows of.
        return {"groups": self.groups, "kind": type(bare), "attributes": bare.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.groups, self.state = state["groups"], {}
        self._made = object.__new__(state["kind"])
        self._made.__dict__.update(state["attributes"])

    def build(self, held: Mapping[str, nn.Parameter], like: torch.optim.Optimizer | None = None) -> Any:
        """An optimizer over `held`, without state. like: take the groups' settings from this one, not the first."""
        source = like or self._made
        if len(source.param_groups) != len(self.groups):
            raise TrainingError(
                "The optimizer has got parameter groups since the job was built, which a switch cannot follow.",
                numbers=f"{len(source.param_groups)} groups, {len(self.groups)} at the start",
                hint="all groups in the optimizer's factory, frozen parameters included",
            )
        params = [[held[name] for name in names if name in held] for names in self.groups]
        return _clone(source, source.param_groups, params)

    def groups_of(self, optimizer: torch.optim.Optimizer, held: Mapping[str, nn.Parameter]) -> list[list[str]]:
        """Names of the parameters in each of the groups of `optimizer`, those added since included."""
        names = {id(p): name for name, p in held.items()}
        added = optimizer.param_groups[len(self.groups) :]
        found = [[names[id(p)] for p in group["params"] if id(p) in names] for group in added]
        return [list(group) for group in self.groups] + found

    def follow(self, held: Mapping[str, nn.Parameter]) -> None:
        """Point the groups of the optimizer that was given at `held`, and clear its state, which the job has.

        It lives as long as its user holds it, and would keep the whole model, and two moments of it, in memory.
        """
        self.state.clear()
        self._made.state.clear()
        # Groups that the user has put behind them are not the job's, and a switch must not break off here.
        for group, names in zip(self._made.param_groups, self.groups, strict=False):
            group["params"] = [held[name] for name in names if name in held]

    def check_elementwise(self, strategy: str) -> None:
        """Raises TrainingError when an update of half a parameter is not half the update of the whole one.

        Tried on a small matrix: under a strategy that splits parameters such an optimizer would train otherwise.
        """
        torch_state = torch.get_rng_state()
        draw = torch.Generator().manual_seed(0)
        weight, grads = torch.randn(4, 6, generator=draw), [torch.randn(4, 6, generator=draw) for _ in range(2)]
        try:
            apart = 0.0
            for group in self._made.param_groups:
                whole = self._tried(group, [weight], [[grad] for grad in grads])[0]
                halves = self._tried(group, [weight[:2], weight[2:]], [[grad[:2], grad[2:]] for grad in grads])
                apart = max(apart, (whole - torch.cat(halves)).abs().max().item())
        except Exception as error:
            raise TrainingError(
                f"{type(self._made).__name__} failed on a matrix of 4 x 6. {strategy} splits parameters over ranks: it "
                "is tried whether their halves are updated as the whole is.",
                numbers=f"{type(error).__name__}: {error}",
                hint="strategy='ddp', or an optimizer such as AdamW or SGD",
            ) from error
        finally:
            torch.set_rng_state(torch_state)
        if apart > 1e-6:
            raise TrainingError(
                f"{type(self._made).__name__} does not update each element by itself, and {strategy} splits parameters "
                "over ranks: it would train otherwise than one process.",
                numbers=f"largest difference {apart:.3g} after two updates",
                hint="strategy='ddp', or an optimizer such as AdamW or SGD",
            )

    def is_adaptive(self) -> bool:
        """Whether steps by gradients ten times as large are hardly larger, as Adam's are: tried on a small matrix."""
        torch_state = torch.get_rng_state()
        weight, grad = torch.zeros(4, 6), torch.linspace(1.0, 2.0, 24).reshape(4, 6)
        try:
            group = {**self._made.param_groups[0], "weight_decay": 0.0}
            small, large = (self._tried(group, [weight], [[grad * times]])[0].norm().item() for times in (1, 10))
        except Exception:  # whatever an optimizer wants of real parameters
            return False
        finally:
            torch.set_rng_state(torch_state)
        return bool(0 < small and large < 2 * small)

    def kinds(self, model: nn.Module) -> dict[str, dict[str, int]]:
        """As job_state.bytes_per_element, before the first step: found by one of a small optimizer of this kind."""
        weight = nn.Parameter(torch.zeros(4, 6))
        small = self.over([weight])
        weight.grad = torch.zeros_like(weight)
        small.step()
        kept = {key: value for key, value in small.state[weight].items() if isinstance(value, torch.Tensor)}
        keys = {key: value.element_size() for key, value in kept.items() if value.shape == weight.shape}
        return {
            name: {"weight": p.element_size()} | (keys if p.requires_grad else {})
            for name, p in model.named_parameters()
        }

    def over(self, params: list[nn.Parameter]) -> Any:
        """An optimizer of this kind and its first group's settings over other parameters, which are on the CPU."""
        settings = self._made.param_groups[0]
        return _trial(self._made, [{**settings, **{k: v for k, v in _ON_CPU.items() if k in settings}}], [params])

    def on_cpu(self, held: Mapping[str, nn.Parameter], plainly: bool) -> Any:
        """As `build`, over tensors on the CPU, for a step of a proof. plainly: updates them one after the other.

        The largest learning rate becomes 0.1: an update is not to be lost where weights are rounded.
        """
        largest = max(float(group.get("lr") or 0) for group in self._made.param_groups)
        settings = []
        for group in self._made.param_groups:
            own = {**group, **{key: value for key, value in _ON_CPU.items() if key in group}}
            if "lr" in group:
                own["lr"] = 0.1 * float(group["lr"]) / largest if largest else 0.1
            if plainly and "foreach" in group:
                own["foreach"] = False
            settings.append(own)
        params = [[held[name] for name in names if name in held] for names in self.groups]
        return _trial(self._made, settings, params)

    def _tried(
        self, group: Mapping[str, Any], weights: list[torch.Tensor], grads: list[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        params = [nn.Parameter(weight.clone()) for weight in weights]
        # Of the small matrix, on the CPU, and not what graphs and kernels of a GPU want.
        settings = {**group, **{key: value for key, value in _ON_CPU.items() if key in group}}
        if not settings.get("lr"):
            settings["lr"] = 0.1
        optimizer = _trial(self._made, [settings], [params])
        for step in grads:
            for p, grad in zip(params, step, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        return [p.detach() for p in params]


def _made_by(factory: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    try:
        return factory(model)
    except TypeError as error:
        if isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
            name = f"{'torch.optim.' * hasattr(torch.optim, factory.__name__)}{factory.__name__}"
            raise TrainingError(
                f"optimizer= is called with the model, and {factory.__name__} wants its parameters.",
                numbers=f"{factory.__name__}({type(model).__name__}): {error}",
                hint=f"optimizer=lambda model: {name}(model.parameters(), lr=1e-3)",
            ) from error
        raise


def _clone(made: torch.optim.Optimizer, settings: list[dict[str, Any]], params: list[list[nn.Parameter]]) -> Any:
    """An optimizer of the same kind and attributes over other parameters.

    By hand: copying one with `copy` keeps only what Optimizer itself knows of, and a subclass may hold more.
    """
    clone = object.__new__(type(made))
    clone.__dict__.update(
        {
            name: copy.copy(value) if isinstance(value, OrderedDict) else value
            for name, value in made.__dict__.items()
            # Wrappers that an LR scheduler put on this very object would update the old parameters.
            if name != "step"
        }
    )
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**{key: _own(value) for key, value in group.items() if key != "params"}, "params": own}
        for group, own in zip(settings, params, strict=True)
    ]
    return clone


def _trial(made: torch.optim.Optimizer, settings: list[dict[str, Any]], params: list[list[nn.Parameter]]) -> Any:
    """As `_clone`, for steps that are none of the training: no hook is called, and what it counts is its own."""
    trial = _clone(made, settings, params)
    kept = {name: value for name, value in vars(trial).items() if name not in ("param_groups", "state")}
    vars(trial).update({name: _own(value) for name, value in kept.items()})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(trial).get(hooks, {}).clear()
    return trial


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value
