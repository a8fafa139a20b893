"""Whether a subclass of nn.Linear with a forward of its own computes what nn.Linear does: found by running it.

A small copy, with drawn weights, gives what `F.linear` gives, and the same gradients, in training and in evaluation. So
`x @ weight.T + bias` is a linear map, and what scales or normalizes its weight, or drops some of its input, is none.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbkit.rank.parallel.module.forward_wrapper import Wrapper
from nbkit.rank.rng.dropout_ops import DRAWS
from nbkit.rank.rng.random_ops import RANDOM

_IN, _OUT = 3, 5
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

_known: dict[Hashable, bool] = {}


def computes_linear(module: nn.Linear) -> bool:
    """Of one that nbkit has put nothing around. Sends nothing, draws nothing, in any thread."""
    forward: Any = type(module).forward
    if isinstance(vars(module).get("forward"), Wrapper):
        return False  # a part of a map that is split already: its forward communicates
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
        except Exception:  # it asks for more than an input, or for other sizes
            return False
        if not all(a.shape == b.shape and torch.allclose(a, b, 0, 1e-12) for a, b in zip(expected, found, strict=True)):
            return False
    return True


def _with_gradients(output: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]


class _DrawingNothing(TorchFunctionMode):
    """Raises for what draws random numbers, which somebody else may need: no linear map does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS or func in RANDOM:
            raise ValueError(f"{func} draws")
        return func(*args, **(kwargs or {}))
