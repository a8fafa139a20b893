"""Read and write the state of an optimizer and of its inner optimizers: per parameter, in groups and in attributes.

`OptimizerHandle` is the object that the user holds. It stays the same when the optimizer behind it is replaced.

`offload` keeps optimizer state in host memory (`offload="cpu"`), for a GPU that has no room for it. A step takes some
parameters at a time: their state goes to the device, the optimizer updates them there, and the state goes back. So a
GPU holds the state of one part, and all weights and gradients. Each step moves the bytes of the state twice over PCIe
(for Adam in float32, 8 + 8 bytes per parameter that this rank updates) and waits for them. Offloading does not change
the results. On CPU ranks nothing moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.telemetry.phases import phase
from nbkit.rank.train.step.several_optimizers import SeveralOptimizers
from nbkit.rank.train.step.weight_average import KeptAverage

State = MutableMapping[Any, dict[str, Any]]

# These settings belong to the run, not to a checkpoint: they choose the implementation, not the algorithm.
OWN_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
_BESIDE = "beside the groups"  # a key of the first group's settings
_OF_TORCH = ("_step_count",)  # of an LR scheduler


def states_of(optimizer: Optimizer, optimizers: Iterable[Optimizer] = ()) -> list[State]:
    """Return the states of `optimizer` and of its inner optimizers, each once.

    optimizers: the inner optimizers; default: the ones that OptimizerSpec has noted.
    """
    every = [optimizer, *(optimizers or vars(optimizer).get("_within", ()))]
    return list({id(each.state): each.state for each in every}.values())


def numbered(number: int, key: str) -> str:
    """Return `key` with the number of its state as a prefix. The first state (0) has no prefix."""
    return f"{number}.{key}" if number else key


def remembered(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return the whole state of `param`: numbered key -> value."""
    # Do not index the defaultdict: that would make an empty entry, and the optimizer would take it for its state.
    return {
        numbered(number, key): value
        for number, state in enumerate(states_of(optimizer))
        if param in state
        for key, value in state[param].items()
    }


def per_element(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of `param` that has a value per element: key -> tensor with the shape of `param`."""
    return {key: value for key, value in remembered(optimizer, param).items() if _follows(value, param)}


def per_parameter(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return copies of the rest of the state of `param`, such as a step count. Tensors are on the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in remembered(optimizer, param).items()
        if not _follows(value, param)
    }


def _follows(value: Any, param: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.ndim > 0


def remember(optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> None:
    """Store `value` in the state of `param`. key: a numbered key, as `remembered` returns."""
    first, _, rest = key.partition(".")
    number, own = (int(first), rest) if first.isdigit() and rest else (0, key)
    states_of(optimizer)[number].setdefault(param, {})[own] = value


def has_place(optimizer: Optimizer, key: str) -> bool:
    """Return True if `remember` can store `key`. A checkpoint may have an average of weights that this job has not."""
    first, _, rest = key.partition(".")
    return not (first.isdigit() and rest) or int(first) < len(states_of(optimizer))


def forget(optimizer: Optimizer) -> None:
    """Clear the states of `optimizer` and of its inner optimizers."""
    for state in states_of(optimizer):
        state.clear()


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group (learning rate, betas, ...) as plain numbers.

    The settings of the first group also contain the numbers in the optimizer's attributes, and the settings and
    attributes of its inner optimizers.
    """
    settings = _settings(optimizer)
    beside: list[dict[str, Any]] = [{"attributes": _attributes(optimizer)}]
    shown = {id(group) for group in optimizer.param_groups}
    for each in _within(optimizer):
        own = {} if shown.issuperset(map(id, each.param_groups)) else {"groups": _settings(each)}
        beside.append({"attributes": _attributes(each), **own})
    if settings and any(len(one["attributes"]) + len(one.get("groups", ())) for one in beside):
        settings[0][_BESIDE] = beside
    return settings


def take_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Apply `settings` that `settings_of` returned."""
    beside = settings[0].get(_BESIDE, ()) if settings else ()
    for each, own in zip([optimizer, *_within(optimizer)], beside, strict=False):
        _set(each, own.get("groups", ()))
        for name, value in own["attributes"].items():
            before = vars(each).get(name)
            vars(each)[name] = torch.full_like(before, value) if isinstance(before, Tensor) else value
    _set(optimizer, settings)


def _within(optimizer: Optimizer) -> list[Optimizer]:
    """Return the inner optimizers that have settings. An average of weights has none, so it can be added later."""
    return [each for each in vars(optimizer).get("_within", ()) if not isinstance(each, KeptAverage)]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, settings, strict=bool(settings)):
        for key, value in saved.items():
            if key in (*OWN_SETTINGS, _BESIDE):
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers in the optimizer's attributes.

    Private booleans are left out: torch uses them for facts about this run.
    """
    return {
        name: _plain(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if name not in _OF_TORCH and not (name.startswith("_") and isinstance(value, bool))
    }


def _plain(value: Any) -> Any:
    """Return `value` with numpy scalars and tensors of one element as Python numbers.

    So reading a checkpoint does not need numpy.
    """
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.cpu()
    return value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value


class OptimizerHandle(torch.optim.Optimizer):
    """Delegates to the optimizer `inner`. It is an Optimizer by type, so that torch's LR schedulers accept it.

    update: makes the step. forgotten: called after zero_grad, with True if the gradients are None now. fits: returns
    True if a tensor of this shape can be state of the parameter under this key.
    """

    inner: torch.optim.Optimizer

    # Do not call Optimizer.__init__: it would make groups and hooks, and those of `inner` are the real ones.
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        update: Callable[[], None],
        forgotten: Callable[[bool], None],
        fits: Callable[[torch.nn.Parameter, str, tuple[int, ...]], bool],
    ) -> None:
        self.__dict__.update(inner=inner, _update=update, _forgotten=forgotten, _fits=fits)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise TrainingError. torch's GradScaler reads this; it would use only the gradients of one rank."""
        raise TrainingError(
            "torch's GradScaler would skip a step on one rank and not on another.",
            hint="precision='fp16' of nbkit.prepare, which scales the loss; without a GradScaler: job.backward(loss)",
        )

    def step(self, closure: Any = None) -> Any:
        """Update the parameters once. A closure is not supported: `job.backward` computes the gradients."""
        if closure is not None:
            raise TypeError("job.optimizer.step takes no closure: job.backward(batch) makes the gradients")
        with phase("optimizer"):
            self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        with phase("optimizer"):
            self.inner.zero_grad(set_to_none=set_to_none)
            self._forgotten(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of this rank's `state_dict`. The strategy must give this rank the same parts as then.

        Raises TrainingError, before anything changes, if the state belongs to other tensors, such as to whole
        parameters of which this rank holds parts.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [p for group in self.inner.param_groups for p in group["params"]]
        if len(saved) != len(held):
            raise _misfit(f"it is of {len(saved)} parameters, and this rank updates {len(held)}")
        for number, p in zip(saved, held, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
                if shape and not self._fits(p, key, shape):
                    raise _misfit(f"{key} of parameter {number} is {shape}, and this rank updates {tuple(p.shape)}")
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)


def _misfit(numbers: str) -> TrainingError:
    return TrainingError(
        "This state does not fit the tensors that the optimizer updates here. Some strategies give each rank only a "
        "part of the tensors.",
        numbers=numbers,
        hint="trainer.load(path) of what trainer.save(path) wrote: it fits every strategy",
    )


PART_BYTES = 64 << 20
"""The most bytes of parameters that are updated at once."""


def offload(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer` keep its state per element in host memory from now on. Changes the optimizer in place.

    Raises TrainingError for an optimizer whose update of one parameter may depend on others.
    """
    several = optimizer.each if isinstance(optimizer, SeveralOptimizers) else [optimizer]
    for kind in map(type, several):
        if kind.__module__.startswith("torch.optim") and kind is not torch.optim.LBFGS:
            continue
        raise TrainingError(
            f"offload= updates a few parameters at a time, and {kind.__name__} may need all of them together.",
            numbers=f"it is of {kind.__module__}; torch's own update each parameter by itself",
            hint="torch.optim.AdamW, or compute=nbkit.Compute(offload=None)",
        )
    update = optimizer.step

    def step(closure: Any = None) -> None:
        _in_parts(optimizer, update)

    settings: dict[str, Any] = {"step": step, "state_device": torch.device("cpu")}
    optimizer.__dict__.update(settings)


def to_host(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of `optimizer` from the device to the host."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            _put_back(optimizer, p, {})


def _in_parts(optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for part in _parts(whole):
            for group, params in zip(groups, part, strict=True):
                group["params"] = params
            at_rest = [(p, key, value) for params in part for p in params for key, value in _fetch(optimizer, p)]
            update()
            hosts = {(id(p), key): host for p, key, host in at_rest}
            for p in (p for params in part for p in params):
                _put_back(optimizer, p, hosts)
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _parts(whole: Sequence[list[nn.Parameter]]) -> Iterator[list[list[nn.Parameter]]]:
    """Yield parts of at most PART_BYTES, or of one larger parameter. A part has a list of parameters per group."""
    part: list[list[nn.Parameter]] = [[] for _ in whole]
    size = 0
    for group, params in enumerate(whole):
        for p in params:
            more = p.numel() * p.element_size()
            if size and size + more > PART_BYTES:
                yield part
                part, size = [[] for _ in whole], 0
            part[group].append(p)
            size += more
    if size or not any(whole):
        yield part


def _fetch(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Move the state of `p` to the device of `p`.

    Return (key, the tensor on the host) for all state but scalars, such as the step count of a fused optimizer.
    """
    # Do not index the defaultdict: that would make an empty entry, and the optimizer would take it for its state.
    state = optimizer.state[p] if p in optimizer.state else {}
    resting = [(key, value) for key, value in state.items() if isinstance(value, Tensor) and value.ndim]
    for key, value in resting:
        state[key] = accelerator().send(value, p.device)
    return resting


def _put_back(optimizer: torch.optim.Optimizer, p: nn.Parameter, hosts: dict[tuple[int, str], Tensor]) -> None:
    state = optimizer.state[p] if p in optimizer.state else {}
    for key, value in list(state.items()):
        if not isinstance(value, Tensor) or not value.ndim or not accelerator().holds(value):
            continue
        host = hosts.get((id(p), key))
        if host is None or accelerator().holds(host) or host.shape != value.shape or host.dtype != value.dtype:
            host = accelerator().pinned(value.shape, value.dtype)
        # A blocking copy: a checkpoint or a switch may read the state on the host next.
        host.copy_(value)
        state[key] = host
