"""Runs something around the forward of a user's module, and takes it off again.

It stands in the module itself, as its attribute `forward`. The class stays what it is: a forward may count its calls in
it, look a registry up by it, or call `super(type(self), self)`. It is an object, and no function that closes over the
original: a deep copy of the module has to compute with its own weights, and a function is not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import nn

from nbkit.errors import StrategyError

_MARK = "_nbkit_parts_of"


class Wrapper:
    """Becomes a module's `forward`. plain: the one before, whose name and signature it has."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        # What another wrapper holds is its own.
        update_wrapper(self, plain, updated=() if isinstance(plain, Wrapper) else ("__dict__",))
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Make `wrapper` the forward of `module`. Raise StrategyError where its class decides what its forward is."""
    vars(module)["forward"] = wrapper
    if module.forward is not wrapper:
        del vars(module)["forward"]
        raise StrategyError(
            f"The class of a {type(module).__name__} decides itself what its forward is.",
            numbers="a property, or a __getattribute__ of its own: nothing can be put around it",
            hint="def forward(self, ...) in the class; or strategy='ddp'",
        )


def wrapped_by(module: nn.Module, kind: type[Wrapper]) -> bool:
    """Return whether a wrapper of `kind` is around the forward of `module`."""
    forward = vars(module).get("forward")
    while isinstance(forward, Wrapper) and not isinstance(forward, kind):
        forward = forward.plain
    return isinstance(forward, kind)


def unwrap(module: nn.Module) -> None:
    """Take every Wrapper off `module` and what is in it, in place."""
    for part in module.modules():
        while isinstance(wrapper := vars(part).get("forward"), Wrapper):
            if getattr(wrapper.plain, "__func__", None) is type(part).forward:
                del part.forward
            else:
                part.forward = wrapper.plain  # type: ignore[method-assign]


def overrides_train(module: nn.Module) -> bool:
    """Whether a part of `module` has a `train()` of its own: it keeps parts in evaluation, or does more than that."""
    return any(type(part).train is not nn.Module.train or "train" in vars(part) for part in module.modules())


def mark_parts(module: nn.Module, strategy: str) -> None:
    """Note on `module` and all in it that `strategy` has left a part of each on this rank. Copies have it too."""
    for part in module.modules():
        vars(part)[_MARK] = strategy


def refuse_copies(module: nn.Module, strategy: str) -> None:
    """Have `module` and all in it raise where a part of the weights would go for all of them.

    What asks is `model.state_dict()`, `copy.deepcopy(model)`, an AveragedModel, `torch.save(model)`.
    """
    methods = {name: _OfParts(name, strategy) for name in ("state_dict", "__deepcopy__", "__reduce_ex__")}
    for part in module.modules():
        vars(part).update(methods)


class _OfParts:
    """Stands for a method of a module."""

    def __init__(self, method: str, strategy: str) -> None:
        self._method, self._strategy = method, strategy

    def __call__(self, *_: Any, **__: Any) -> Any:
        is_state = self._method == "state_dict"
        raise StrategyError(
            f"{'state_dict()' if is_state else 'A copy'} of the model would have this rank's part of the weights for "
            f"the whole: {self._strategy} splits them over the ranks.",
            numbers="" if is_state else "by copy.deepcopy" if self._method == "__deepcopy__" else "by pickle",
            hint="trainer.full_state_dict()   or job.full_state_dict(), on every rank, is the whole"
            + ("" if is_state else "; load it into a model that you build anew"),
        )


def marked_parts(module: nn.Module) -> str | None:
    """The strategy that has left a part of something in `module`; None when all of it is whole."""
    return next((vars(part)[_MARK] for part in module.modules() if _MARK in vars(part)), None)
