"""Save and load models that change their own state dict: by hooks, by extra state, or by a `state_dict` method.

`full_state_dict` must equal the whole model's `state_dict()` in one process. So it calls `state_dict()` of a copy of
the whole model. A checkpoint contains parameters and buffers unchanged, and the extra state separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError, TrainingError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.parallel.module.batch_norm import kept_buffers
from nbkit.rank.parallel.module.copies import homes, replace_submodule, skeleton_of
from nbkit.rank.parallel.proof.observe import MemoryUses, memory_of
from nbkit.rank.parallel.reshard.plain_attributes import put, set_since, take_objects_along
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.torch_private import tree_map_only
from nbkit.rank.train.checkpoint.manifest import encoded

if TYPE_CHECKING:
    from nbkit.rank.train.builder import Builder

_METHODS = "state_dict", "_save_to_state_dict", "get_extra_state"
_HOOKS = "_state_dict_hooks", "_state_dict_pre_hooks"


def names_of(skeleton: nn.Module) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, key of the tensor, shape) for each parameter and buffer, in the order of a state dict.

    The names of a tied weight share one key. Runs no user code.
    """
    keys = {id(p): f"weight/{name}" for name, p in skeleton.named_parameters()}
    keys |= {id(buffer): f"buffer/{name}" for name, buffer in skeleton.named_buffers()}
    kept, found = kept_buffers(skeleton), []
    for path, part in skeleton.named_modules(remove_duplicate=False):
        for name, value in (*part._parameters.items(), *part._buffers.items()):
            name = f"{path}.{name}" if path else name
            if value is not None and (isinstance(value, nn.Parameter) or name in kept):
                found.append((name, keys[id(value)], tuple(value.shape)))
    return found


def changed_by(module: nn.Module) -> str:
    """Return the path of the first submodule with its own code for the state dict, or "" if there is none."""
    for path, part in module.named_modules():
        own = any(getattr(type(part), name) is not getattr(nn.Module, name) for name in _METHODS)
        if own or any(vars(part)[name] for name in _HOOKS):
            return f"{path or 'the model'} ({type(part).__name__})"
    return ""


def extra_states(sharded_model: ShardedModel, builder: Builder) -> dict[str, Any]:
    """Return path -> extra state, for each submodule that has one. Collective if there is one.

    The state is that of the first rank that runs the submodule. Raises StrategyError, on every rank, if
    `get_extra_state` reads a weight of which a rank holds only a part, and TrainingError if it fails.
    """
    paths = [path for path, part in builder.skeleton.named_modules() if _has_extra(part)]
    if not paths:
        return {}
    own, failed = dict[str, Any](), list[NbkitError]()

    def refuse(*_: Any) -> None:
        raise StrategyError(
            f"The extra state of {path or 'the model'} reads weights, but a rank has only a part of them, or nothing.",
            numbers=f"get_extra_state() on rank {builder.rank}, under {sharded_model.strategy}",
            hint="trainer.switch('ddp') first   (under zero1 and zero2 a rank has each weight whole, too)",
        )

    module = sharded_model.module
    memory = {memory_of(p): "" for p in sharded_model.data.parts()}
    try:
        with MemoryUses(memory, refuse):
            for path in paths:
                if sharded_model.runs(f"{path}."):
                    own[path] = module.get_submodule(path).get_extra_state()
    except NbkitError as error:
        failed.append(error)
    except Exception as error:
        said = f"on rank {builder.rank}: {type(error).__name__}: {error}"
        failed.append(
            TrainingError(
                "get_extra_state() of the model fails.", numbers=said, hint="correct this method of the model"
            )
        )
    own = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), own)
    everyone = all_gather_objects((own, failed), world_size=builder.world_size, device=builder.device)
    for _, errors in everyone:
        if errors:
            raise errors[0]
    return {path: value for states, _ in reversed(everyone) for path, value in states.items()}


def writable_states(sharded_model: ShardedModel, builder: Builder) -> dict[str, Any]:
    """Return `extra_states`. Collective. Raises TrainingError, on every rank, if one cannot be saved."""
    states = extra_states(sharded_model, builder)
    for path, value in states.items():
        try:
            encoded(value)
        except TypeError as error:
            raise TrainingError(
                f"The extra state of {path or 'the model'} cannot be written to a checkpoint.",
                numbers=f"get_extra_state() gives a {type(value).__name__}: {error}",
                hint="numbers, text, tensors, and lists, tuples and dicts of them",
            ) from None
    return states


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the saved extra state of each submodule. states: path -> extra state."""
    parts = dict(module.named_modules())
    for path, value in states.items():
        if path in parts:
            parts[path].set_extra_state(value)


def whole_state_dict(whole: Mapping[str, Tensor], sharded_model: ShardedModel, builder: Builder) -> dict[str, Tensor]:
    """Return the `state_dict()` of the whole model. Collective. whole: key -> tensor, for all weights and buffers.

    It is made by a copy of the model with these tensors, and with the attributes and extra state of the model that
    trains.
    """
    states, live = extra_states(sharded_model, builder), sharded_model.module
    own = {at: value for at, value in set_since(live, sharded_model.built).items() if sharded_model.runs(f"{at[0]}.")}
    everyone = all_gather_objects(own, world_size=builder.world_size, device=builder.device)
    copy = skeleton_of(builder.skeleton)
    take_objects_along(live, copy)
    for attributes in reversed(everyone):
        put(attributes, copy)
    for name, places in homes(copy).items():
        replace_submodule(
            places, nn.Parameter(whole[f"weight/{name}"], requires_grad=getattr(*places[0]).requires_grad)
        )
    buffers = {id(buffer): f"buffer/{name}" for name, buffer in copy.named_buffers()}
    for part in copy.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (key := buffers.get(id(buffer), "")) in whole:
                part._buffers[name] = whole[key]
    for path, part in copy.named_modules():
        if path in states:
            vars(part)["get_extra_state"] = lambda value=states[path]: value
    with torch.no_grad():
        return dict(copy.state_dict())


def _has_extra(part: nn.Module) -> bool:
    return type(part).get_extra_state is not nn.Module.get_extra_state
