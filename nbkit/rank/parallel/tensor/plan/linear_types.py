"""Linear maps, whichever class they are of: torch's Linear, HF's Conv1D, and either of them under LoRA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrapped_by
from nbkit.rank.parallel.tensor.plan.linear_trial import computes_linear
from nbkit.tensor_layout import bounds


def _is_plain(module: Any) -> bool:
    # By what they compute: a subclass that computes something else is no linear map.
    if isinstance(module, nn.Linear):
        linear = computes_linear(module)
    else:
        conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        linear = (conv1d or type(module).forward is nn.Linear.forward) and not wrapped_by(module, Wrapper)
    return linear and module._parameters.get("weight") is not None


def is_lora(module: nn.Module) -> bool:
    """Whether it is peft's wrapper of a linear map."""
    base = module._modules.get("base_layer")
    return base is not None and _is_plain(base) and isinstance(module._modules.get("lora_A"), nn.ModuleDict)


def is_linear(module: nn.Module | None) -> bool:
    """Whether its last dim is mapped by one matrix that is here (a pipeline stage may have dropped it)."""
    return module is not None and (_is_plain(module) or is_lora(module))


def is_packed_attention(module: nn.Module) -> bool:
    """Whether it computes what torch's own MultiheadAttention does."""
    return type(module).forward is nn.MultiheadAttention.forward and not wrapped_by(module, Wrapper)


def core(module: nn.Module) -> Any:
    """The module that holds `weight` and perhaps `bias`."""
    base = module._modules.get("base_layer")
    return module if base is None else base


def adapters(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """(name, A, B) of every LoRA adapter on it."""
    wrapper: Any = module
    if "base_layer" not in module._modules:
        return []
    return [(name, wrapper.lora_A[name], wrapper.lora_B[name]) for name in wrapper.lora_A]


def feature_dims(module: nn.Module) -> tuple[int, int]:
    """(dim of the weight along the input features, along the output features)."""
    return (1, 0) if isinstance(core(module), nn.Linear) else (0, 1)


def sizes(module: nn.Module) -> tuple[int, int]:
    """(input features, output features)."""
    shape = core(module).weight.shape
    inward, outward = feature_dims(module)
    return int(shape[inward]), int(shape[outward])


def ranges_of(widths: Iterable[int], size: int, index: int) -> list[tuple[int, int]]:
    """What part `index` of `size` holds of each of the matrices of `widths`, which lie behind one another."""
    found, at = [], 0
    for width in widths:
        start, stop = bounds(width, size, index)
        found.append((at + start, at + stop))
        at += width
    return found
