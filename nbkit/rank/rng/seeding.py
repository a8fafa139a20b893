"""Seeds a job's random numbers by (seed, step, rank), so that a step is repeatable and does not depend on the past.

It also builds the module that trains, and checks that it can be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.forward_wrapper import marked_parts, overrides_train, unwrap
from nbkit.rank.rng.keyed_dropout import unfollow

# These replace the rank for draws that are equal on every rank: in a step, and in an epoch of iterable data.
SHARED, ITERATED = -1, -2

_left_alone: ContextVar[bool] = ContextVar("left_alone", default=False)

# Odd constants of splitmix64, by which neighbouring steps and ranks get very different seeds.
_STEP, _RANK, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators of the CPU and the rank's GPU for one step on one rank."""
    set_seed(mixed(seed, step, rank))


def set_seed(value: int) -> None:
    """Seed torch's generators of the CPU and the GPU in use. Inside `generators_left_alone`, do nothing.

    torch.manual_seed would make a traceback for each kind of device that is not in use. That takes milliseconds in
    every trial of a model.
    """
    if _left_alone.get():
        return
    torch.default_generator.manual_seed(value)
    accelerator().seed(value)


def mixed(seed: int, step: int, rank: int) -> int:
    """Return one seed from three numbers."""
    return ((seed * _MIX) ^ (step * _STEP) ^ (rank * _RANK)) & (2**63 - 1)


def seeded(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which torch may be seeded. It restores torch's generators on exit."""
    return accelerator().generators_kept([device])


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """Keep trials of a model from seeding or restoring torch's generators, which another thread may use.

    Use this only if the trials draw nothing.
    """
    token = _left_alone.set(True)
    try:
        yield
    finally:
        _left_alone.reset(token)


def generators_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores torch's generators on exit. Inside `generators_left_alone` it does nothing."""
    return nullcontext() if _left_alone.get() else accelerator().generators_kept(devices)


def build(model: nn.Module | Callable[[], nn.Module], *, seed: int, device: torch.device) -> nn.Module:
    """Return the module to train, on `device`. If `model` is a callable, it is called with torch seeded by `seed`.

    Wrappers that an earlier job has put around blocks are removed. Raises TrainingError if the result is not a module,
    has no parameters to train, holds meta tensors, or is split already.
    """
    if isinstance(model, nn.Module):
        module = model
    else:
        with seeded(device):
            torch.manual_seed(seed)
            module = model()
    if not isinstance(module, nn.Module):
        raise TrainingError(
            "The model is not a torch module.",
            numbers=f"got {type(module).__name__}",
            hint="model=lambda: MyModule(...)",
        )
    _refuse_wrapped(module)
    _refuse_kinds(module)
    if not any(p.requires_grad for p in module.parameters()):
        frozen = sum(1 for _ in module.parameters())
        raise TrainingError(
            "The model has no parameters to train.",
            numbers=f"{type(module).__name__}: {frozen} parameters{', all frozen' if frozen else ''}",
            hint="give it a layer with weights" if not frozen else "param.requires_grad_(True)",
        )
    if meta := [name for name, p in module.named_parameters() if p.is_meta]:
        raise TrainingError(
            "The model is on the meta device: it has shapes, but no weights.",
            numbers=f"{len(meta)} parameters, first {meta[0]!r}",
            hint="build it without torch.device('meta')",
        )
    unwrap(module)
    unfollow(module)
    if not module.training:
        # The model was loaded for inference. If the model itself is in training mode, its frozen modules stay frozen.
        module.train()
    elif overrides_train(module):
        # A plain torch loop also calls train() before it trains. Frozen modules stay frozen.
        modes = [(part, part.training) for part in module.modules()]
        module.train()
        for part, mode in modes:
            part.training = part.training and mode
    return module.to(device)


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    return tuple(name for name in ((named,) if isinstance(named, str) else named) if name[:2] != "__")


def _refuse_kinds(module: nn.Module) -> None:
    """Raise TrainingError for kinds of tensors and modules that nbkit cannot send, cut or copy."""
    for path, part in module.named_modules():
        if slots := [name for kind in type(part).__mro__ for name in _slots(kind) if hasattr(part, name)]:
            raise TrainingError(
                "A module keeps values in __slots__, which copies of a module do not have.",
                numbers=f"{slots[0]!r} of {path or 'the model'}, a {type(part).__name__}",
                hint="a class without __slots__",
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise TrainingError(
                "A module is scripted or traced: its code can neither be split over ranks nor copied.",
                numbers=path or type(part).__name__,
                hint="the module before torch.jit.script or torch.jit.trace; compute=nbkit.Compute(compile=True) "
                "compiles blocks",
            )
    every: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in every:
        is_param = isinstance(tensor, nn.Parameter)
        if is_lazy(tensor):
            odd, hint = (
                "has no shape before its lazy module is called",
                "call model(example) once, before nbkit gets the model",
            )
        elif tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
            dense = "torch.nested.to_padded_tensor(t, 0)" if tensor.is_nested else "t.dequantize()"
            dense = dense if tensor.is_nested or tensor.is_quantized else "t.to_dense()"
            odd, hint = f"is {kind}, and ranks can send only dense tensors", f"{dense} instead of the tensor t"
        elif any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            odd, hint = (
                "has several elements at one place in memory, as after expand()",
                "t.expand(...).contiguous()",
            )
        elif is_param and tensor.dtype == torch.bool:
            odd, hint = "is of bool, which no optimizer updates", f"self.register_buffer({name.split('.')[-1]!r}, t)"
        else:
            continue
        shape = "no shape" if is_lazy(tensor) or tensor.is_nested else f"shape {tuple(tensor.shape)}"
        raise TrainingError(
            f"The {'parameter' if is_param else 'buffer'} {name!r} {odd}.",
            numbers=f"{shape}, {str(tensor.dtype)[6:]}",
            hint=hint,
        )


def _refuse_wrapped(module: nn.Module) -> None:
    """Raise TrainingError for a wrapped or split model. It finds wrappers by name, because imports take seconds."""
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
    for part in module.modules():
        if found := wrappers & {kind.__name__ for kind in type(part).__mro__}:
            raise TrainingError(
                f"The model is wrapped in {(name := min(found))}, but nbkit sums the gradients itself.",
                numbers=f"{type(part).__name__}, with {sum(1 for _ in part.parameters())} parameters",
                hint="model=ddp.module" if name.endswith("DataParallel") else "the model before fully_shard(...)",
            )
    if (strategy := marked_parts(module)) is not None:
        raise TrainingError(
            f"The model belongs to a job under {strategy}, which has split it.",
            numbers=f"this rank holds {sum(p.numel() for p in module.parameters()):,} elements of it",
            hint="job.switch('ddp') or trainer.switch('ddp') makes it whole; or model=lambda: ... builds a new one, "
            "which can load full_state_dict()",
        )
    if split := [name for name, p in module.named_parameters() if type(p).__name__ == "DTensor"]:
        raise TrainingError(
            "The model's parameters are split over ranks already.",
            numbers=f"{len(split)} DTensors, first {split[0]!r}",
            hint="the model before parallelize_module(...) or distribute_tensor(...)",
        )
