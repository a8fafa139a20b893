"""Linear maps of any class: torch's Linear, HF's Conv1D, and either of them under LoRA.

A subclass of nn.Linear with its own forward counts as a linear map if it computes the same as nn.Linear. This is tested
on a small copy with random weights: it must give the output and the gradients of `F.linear`, in training and in
evaluation. So `x @ weight.T + bias` is a linear map. A forward that scales or normalizes its weight, or drops some of
its input, is not.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrapped_by
from nbkit.rank.rng.random_ops import DRAWS, RANDOM
from nbkit.tensor_layout import bounds

_IN, _OUT = 3, 5
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

_known: dict[Hashable, bool] = {}


def computes_linear(module: nn.Linear) -> bool:
    """Return True if the forward of `module` computes the same as nn.Linear and nbkit has not wrapped it.

    Sends nothing and draws no random numbers. May run in any thread.
    """
    forward: Any = type(module).forward
    if isinstance(vars(module).get("forward"), Wrapper):
        return False  # it is split already, and its forward communicates
    if forward is nn.Linear.forward:
        return True
    if module._modules or module._buffers:
        return False
    if module._parameters.keys() != {"weight", "bias"} or module._parameters["weight"] is None:
        return False
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in _OF_LINEAR}
    key = (forward, module._parameters["bias"] is None, tuple(own.items()))
    if not all(isinstance(value, _PLAIN) for value in own.values()):
        return _tried(module)
    if key not in _known:
        _known[key] = _tried(module)
    return _known[key]


_OF_LINEAR = frozenset({"in_features", "out_features", "training", "forward"})


def _tried(module: nn.Linear) -> bool:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    small = copy.copy(module)
    bias = None if module._parameters["bias"] is None else nn.Parameter(drawn(_OUT).detach())
    weight, x = nn.Parameter(drawn(_OUT, _IN).detach()), drawn(2, 4, _IN)
    vars(small).update(_parameters={"weight": weight, "bias": bias}, in_features=_IN, out_features=_OUT)
    wanted = [each for each in (x, weight, bias) if each is not None]
    expected = _with_gradients(F.linear(x, weight, bias), wanted)
    for training in (True, False):
        small.training = training
        try:
            with torch.enable_grad(), _DrawingNothing():
                found = _with_gradients(type(module).forward(small, x), wanted)
        except Exception:  # it needs more than one input, or other sizes
            return False
        if not all(a.shape == b.shape and torch.allclose(a, b, 0, 1e-12) for a, b in zip(expected, found, strict=True)):
            return False
    return True


def _with_gradients(output: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]


class _DrawingNothing(TorchFunctionMode):
    """Mode that raises an error for functions that draw random numbers. A linear map does not draw."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS or func in RANDOM:
            raise ValueError(f"{func} draws")
        return func(*args, **(kwargs or {}))


def _is_plain(module: Any) -> bool:
    # A subclass that computes something else is not a linear map.
    if isinstance(module, nn.Linear):
        linear = computes_linear(module)
    else:
        conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        linear = (conv1d or type(module).forward is nn.Linear.forward) and not wrapped_by(module, Wrapper)
    return linear and module._parameters.get("weight") is not None


def is_lora(module: nn.Module) -> bool:
    """Return True if the module is peft's wrapper of a linear map."""
    base = module._modules.get("base_layer")
    return base is not None and _is_plain(base) and isinstance(module._modules.get("lora_A"), nn.ModuleDict)


def is_linear(module: nn.Module | None) -> bool:
    """Return True if the module multiplies the last dim by a matrix that this pipeline stage has."""
    return module is not None and (_is_plain(module) or is_lora(module))


def is_packed_attention(module: nn.Module) -> bool:
    """Return True if the module has the forward of torch's own MultiheadAttention."""
    return type(module).forward is nn.MultiheadAttention.forward and not wrapped_by(module, Wrapper)


def core(module: nn.Module) -> Any:
    """Return the module with `weight` and perhaps `bias`: the module itself, or the base layer of LoRA."""
    base = module._modules.get("base_layer")
    return module if base is None else base


def adapters(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Return (name, A, B) of every LoRA adapter on the module."""
    wrapper: Any = module
    if "base_layer" not in module._modules:
        return []
    return [(name, wrapper.lora_A[name], wrapper.lora_B[name]) for name in wrapper.lora_A]


def feature_dims(module: nn.Module) -> tuple[int, int]:
    """Return (dim of the weight for the input features, dim for the output features)."""
    return (1, 0) if isinstance(core(module), nn.Linear) else (0, 1)


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return (input features, output features)."""
    shape = core(module).weight.shape
    inward, outward = feature_dims(module)
    return int(shape[inward]), int(shape[outward])


def ranges_of(widths: Iterable[int], size: int, index: int) -> list[tuple[int, int]]:
    """Return the ranges of part `index` of `size` in each of the concatenated matrices of `widths`."""
    found, at = [], 0
    for width in widths:
        start, stop = bounds(width, size, index)
        found.append((at + start, at + stop))
        at += width
    return found
