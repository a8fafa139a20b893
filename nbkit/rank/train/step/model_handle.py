"""Keep the user's model object and its submodules valid under every strategy.

A strategy computes with its own modules. Each module object that the user may hold (`model`, `head = model.head`) takes
over the class and the attributes of the strategy's module at the same path, and replaces it there. Parameters cannot be
replaced in this way. A parameter of an earlier strategy raises an error when its values are used.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.copies import rebind_handles
from nbkit.rank.parallel.plan import keeps_whole
from nbkit.rank.torch_private import tree_leaves
from nbkit.strategy import Strategy

Shown = list[tuple[nn.Module, type[nn.Module], dict[str, Any]]]
"""Each module of a tree, with its class and attributes."""


_handles: weakref.WeakSet[ModelHandle] = weakref.WeakSet()


class ModelHandle:
    """Makes `model` and every module in it show the modules in force.

    whole: the strategy in force splits nothing, so the parameters are the ones that the user made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.whole = model, True
        _handles.add(self)
        self._parts = dict(model.named_modules(remove_duplicate=False))
        self._params = dict(model.named_parameters())
        self._shows = vars(model)

    def check_alone(self, strategy: Strategy) -> None:
        """Raise TrainingError if another job shares parameters with this model, and would not under `strategy`.

        Under ddp both jobs train the same tensors. Any other strategy gives each job its own tensors.
        """
        if self._sharing(strategy) is not None:
            gc.collect()  # frees jobs that are no longer referenced
        if (found := self._sharing(strategy)) is not None:
            name, other = found
            raise TrainingError(
                f"Another job trains the parameter {name!r} too, and under {strategy} each job would have its own "
                "copy.",
                numbers=f"a model {type(other).__name__}, beside this {type(self.model).__name__}",
                hint="strategy='ddp' for both; or one model that holds both, in one job; or del the other job",
            )

    def _sharing(self, strategy: Strategy) -> tuple[str, nn.Module] | None:
        whole = keeps_whole(strategy)
        own = {id(p): name for name, p in self._params.items()}
        for other in list(_handles):
            if other.model is not self.model and not (whole and other.whole):
                for param in other._params.values():
                    if id(param) in own:
                        return own[id(param)], other.model
        return None

    def show(self, module: nn.Module, strategy: Strategy) -> None:
        """Make the model and its submodules show those of `module`, which computes under `strategy`."""
        self.whole = keeps_whole(strategy)
        places = list(module.named_modules(remove_duplicate=False))
        stable: dict[int, nn.Module] = {}
        for path, part in places:
            handle = stable.setdefault(id(part), self._parts.setdefault(path, part))
            if handle is not part:
                handle.__class__, handle.__dict__ = part.__class__, part.__dict__
        for _, part in places:
            for name, child in part._modules.items():
                if child is not None:
                    # Modules made by copy.copy share one `_modules`, so the handles may be in it already.
                    part._modules[name] = stable.get(id(child), child)
        if moved := {id(part): stable[id(part)] for _, part in places if stable[id(part)] is not part}:
            rebind_handles(self.model, moved)
        self._shown = places  # keep these modules alive: other objects have only weak references to them
        params = dict(module.named_parameters())
        new = set(map(id, params.values()))
        for param in params.values():
            _revive(param)
        for name, param in self._params.items():
            if id(param) not in new:
                _retire(param, name, str(strategy))
        self._params, self._shows = params, vars(self.model)

    @property
    def taken_over(self) -> bool:
        """Return True if another job trains the model now. Then the parameters of this job are retired."""
        return vars(self.model) is not self._shows

    def check(self) -> None:
        """Raise TrainingError if another job has taken the model over."""
        if self.taken_over:
            raise TrainingError(
                "Another job has taken over the model of this one.",
                numbers=type(self.model).__name__,
                hint="continue with the newer job; or model=lambda: build() for each job, which builds two models",
            )


def shown_by(module: nn.Module) -> Shown:
    """Return the class and attributes of each module, for `show_again`."""
    return [(part, type(part), vars(part)) for part in module.modules()]


def show_again(shown: Shown) -> None:
    """Restore the class and attributes of the modules to the result of `shown_by`."""
    for part, kind, attributes in shown:
        # nn.Module.__setattr__ reads the parameters, and that may wait for a rank that has failed.
        object.__setattr__(part, "__class__", kind)
        object.__setattr__(part, "__dict__", attributes)


class Retired(nn.Parameter):
    """A parameter of the model under an earlier strategy. Its shape can be read. Using its values raises an error."""

    retired: tuple[type[nn.Parameter], str, str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Retired))
        _, name, strategy = first.retired
        raise TrainingError(
            f"This tensor was the model's parameter {name!r} before {strategy} took over, and it is no longer trained.",
            numbers=f"shape {tuple(first.shape)}, used by {getattr(func, '__name__', func)}",
            hint=f"job.model.get_parameter({name!r}), or trainer.model, each time that you use it",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the parameter {self.retired[1]!r} of before {self.retired[2]}>"


_TENSOR: Any = Tensor
_READ = ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "is_sparse", "is_meta")

_HARMLESS = {
    *(getattr(_TENSOR, name).__get__ for name in _READ),
    *(_TENSOR.requires_grad.__set__, _TENSOR.data.__set__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.storage_offset, Tensor.untyped_storage),
    *(Tensor.data_ptr, Tensor.is_set_to, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex),
}


def _retire(param: nn.Parameter, name: str, strategy: str) -> None:
    if not isinstance(param, Retired):
        param.retired = type(param), name, strategy  # type: ignore[attr-defined]
        param.__class__ = Retired  # type: ignore[assignment]


def _revive(param: nn.Parameter) -> None:
    if isinstance(param, Retired):
        before: Any = param.retired[0]
        param.__class__ = before
        del param.__dict__["retired"]
