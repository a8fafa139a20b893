"""Builds a model again by the callable that built it: a second one that shares nothing with the first.

A copy is made by nbkit's own code, which a proof is not to rest on. And some models no copy is right of: those whose
classes are made anew for each, or that keep parts in what `copy.deepcopy` shares.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.parallel.module.meta_module import homes, marked, placeholder, replace
from nbkit.rank.parallel.module.parameter_aliases import note_aliases, tensors_beside
from nbkit.rank.parallel.module.rebound_functions import parts_of
from nbkit.rank.parallel.proof.outside_state import outside_kept
from nbkit.rank.parallel.reshard.plain_attributes import plain_attributes, put
from nbkit.rank.rng.seeding import Drawn, seeded

Build = Callable[[], nn.Module]


def built_again(build: Build, like: nn.Module, *, first: nn.Module | None = None) -> nn.Module:
    """Return what `build` gives now, as the skeleton `like` is: without memory, with its buffers, attributes and modes.

    first: what `build` gave at first, if that is still there. `build` prints nothing, and random generators are
    afterwards as before. Raises TrainingError where it gives another model than before, or the same object again.
    """
    made = _called(build, like)
    if not isinstance(made, nn.Module) or parts_of(made) & parts_of(like if first is None else first):
        raise _other("it gives the same object each time")
    if (found := _differences(made, like)) != "":
        raise _other(found)
    note_aliases(made)
    params = dict(like.named_parameters())
    for name, places in homes(made).items():
        replace(places, placeholder(params[name].shape, params[name]))
    take_buffers(made, like)
    for (_, own), (_, theirs) in zip(tensors_beside(made), tensors_beside(like), strict=True):
        if own.shape == theirs.shape and not isinstance(own, nn.Parameter):
            own.data = theirs.detach().clone()
    put(plain_attributes(like), made)
    return made


def take_buffers(made: nn.Module, like: nn.Module) -> None:
    """Let the buffers of `made` be those of `like`, which is of the same parts; in place where that goes."""
    parts = dict(like.named_modules())
    for path, part in made.named_modules():
        for name, buffer in parts[path]._buffers.items():
            own = part._buffers[name]
            if buffer is None or own is None:
                part._buffers[name] = None if buffer is None else marked(buffer.detach().clone(), buffer)
            elif (own.shape, own.dtype, own.device) == (buffer.shape, buffer.dtype, buffer.device):
                marked(own, buffer).detach().copy_(buffer)
            else:
                part._buffers[name] = marked(buffer.detach().clone(), buffer)


def _called(build: Build, like: nn.Module) -> Any:
    drawn = Drawn.so_far()
    device = next(like.parameters()).device
    try:
        with (
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            warnings.catch_warnings(),
            seeded(device),
            outside_kept(like, build),
            classes_kept(),
        ):
            warnings.simplefilter("ignore")
            try:
                with _Unfilled():
                    return build()
            except Exception:  # it computes with the numbers that were not drawn
                return build()
    finally:
        drawn.restore()


@contextmanager
def classes_kept() -> Iterator[None]:
    """Undo what happens inside to classes of modules.

    A callable that patches one (`Block.forward = scaled(Block.forward)`) would put its patch around that of the first
    model, which trains.
    """
    kinds, ahead = set[type](), [nn.Module]
    while ahead:
        for kind in ahead.pop().__subclasses__():
            if kind not in kinds:
                ahead.append(kind)
                kinds.update(kind.__mro__)
    before = {kind: dict(vars(kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, held in before.items():
            now = dict(vars(kind))
            for name in now.keys() | held.keys():
                with suppress(AttributeError, TypeError):
                    if name not in held:
                        type.__delattr__(kind, name)
                    elif now.get(name) is not held[name]:
                        type.__setattr__(kind, name, held[name])


class _Unfilled(TorchFunctionMode):
    """Leaves out the drawing of random numbers into tensors: most of the time that it takes to build a model."""

    _FILLS = frozenset({"uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "bernoulli_", "exponential_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._FILLS:
            # What is given to torch.nn.init comes by name.
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _differences(made: nn.Module, like: nn.Module) -> str:
    for what, own, theirs in zip(("parameter", "buffer", "module"), _parts(made), _parts(like), strict=True):
        if own != theirs:
            first = next((b for a, b in zip(own, theirs, strict=False) if a != b), None)
            return f"{len(own)} {what}s for {len(theirs)}" if first is None else f"{what} {first[0]!r} is another"
    if len(list(tensors_beside(made))) != len(list(tensors_beside(like))):
        return "its attributes hold other tensors"
    return ""


def _parts(module: nn.Module) -> tuple[list[tuple[str, Any]], ...]:
    """Of parameters, buffers and modules, what is the same when a model is built again."""
    params = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    buffers = [(name, buffer.dtype) for name, buffer in module.named_buffers()]
    return params, buffers, [(path, type(part).__qualname__) for path, part in module.named_modules()]


def _other(numbers: str) -> TrainingError:
    return TrainingError(
        "The model's callable does not build the same model again.",
        numbers=numbers,
        hint="model=lambda: MyModule(...), of values that stay as they are",
    )
