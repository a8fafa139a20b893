"""Compute the products of linear layers in fp8 (8-bit floats), with torchao's float8 training.

torchao's recipe "rowwise_with_gw_hp" computes y = x W^T and the gradient of x in fp8, and the gradient of W in the
precision of x. Each row of x, of W and of the gradient of y has its own scale. In the gradient of x, all of W has one
scale. So a row of a result depends on its own row and on W alone, as without fp8. Strategies that divide rows give what
one process gives. A strategy that divides W (tp) gives something else: plan.py refuses it. So the comparison of a
small step with one process (whole_step.py), and the measurements of a model (model_trace.py), leave fp8 out.

Two details keep this true. The recipe rounds scales to powers of two, and here they are exact: a rank may compute with
a multiple of the gradient of one process, which is divided out later. Under autocast, W is first rounded to the dtype
of autocast, because ZeRO 3 may gather it in this dtype.

Kernels multiply fp8 numbers on GPUs only. Elsewhere they are emulated: `_Emulated` rounds to the same numbers, and
multiplies them in float32, or in float64 for a float64 model. torchao emulates in float32 alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.parallel.module.block_discovery import ROUTERS, mixtures, structural_blocks, within
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrap

_MULTIPLE = 16  # kernels for fp8 take sizes that are multiples of it
_FORMAT = torch.float8_e4m3fn
_WITHOUT = "compute=nbkit.Compute(fp8=False)"


def fp8_layers(model: nn.Module) -> tuple[list[str], Counter[str]]:
    """Return the names of the linear layers that can compute in fp8, and how many others there are for each reason.

    They depend on the structure and the sizes of `model` alone, so they are the same under each strategy.
    """
    blocks, routed = structural_blocks(model), mixtures(model)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    found, without = [], Counter[str]()
    for name, part in linears.items():
        owner, _, own = name.rpartition(".")
        if not within(name, blocks) or (name in blocks and name == list(linears)[-1]):
            without["outside of the blocks, such as the head"] += 1
        elif owner in routed and own in ROUTERS:
            without["routers of experts"] += 1
        elif type(part) is not nn.Linear:
            without["of a class that is not nn.Linear"] += 1
        elif part.in_features % _MULTIPLE or part.out_features % _MULTIPLE:
            without[f"with sizes that are not multiples of {_MULTIPLE}"] += 1
        else:
            found.append(name)
    return found, without


def spelled_fp8(model: nn.Module) -> str:
    """Return how many linear layers of `model` compute in fp8, and why others do not."""
    found, without = fp8_layers(model)
    others = "".join(f"; not {count} {why}" for why, count in without.items())
    return f"fp8 in {len(found)} of {len(found) + without.total()} linear layers{others}"


def check_fp8(model: nn.Module, device: torch.device) -> None:
    """Raise TrainingError if `model` cannot compute in fp8 on `device`, or if torchao is needed and missing."""
    if not fp8_layers(model)[0]:
        raise TrainingError(
            "The model has no layer that can compute in fp8.", numbers=spelled_fp8(model), hint=_WITHOUT
        )
    if not accelerator().holds(device):
        return
    if not accelerator().multiplies_fp8(device):
        raise TrainingError(
            f"{accelerator().name(device)} cannot compute matrix products in fp8.",
            numbers="NVIDIA's GPUs have them from compute capability 8.9 on, such as L4, H100 and B200",
            hint=f"{_WITHOUT}, with precision='bf16'",
        )
    torchao_config()


def torchao_config(*, emulate: bool = False) -> Any:
    """Return torchao's settings for a layer. Raise TrainingError if torchao, or its recipe, is missing."""
    try:
        from torchao.float8 import Float8LinearConfig

        made = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        return replace(made, emulate=emulate, round_scales_to_power_of_2=False)
    except (ImportError, AttributeError, AssertionError, TypeError) as error:
        raise TrainingError(
            "fp8=True needs torchao on GPUs.",
            numbers=f"{type(error).__name__}: {error}",
            hint=f"pip install 'torchao>=0.18'   on every host; or {_WITHOUT}",
        ) from error


def compute_in_fp8(module: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Make the linear layers `names` of `module`, which will be on `device`, compute in fp8. In place."""
    kernels = accelerator().multiplies_fp8(device)
    for name in names:
        layer: Any = module.get_submodule(name)
        # Made here, because torch.compile cannot trace how a module is made.
        wrap(layer, Fp8(layer, torchao_layer(layer.weight) if kernels else None))


class Fp8(Wrapper):
    """Computes a linear layer in fp8. torchaos: torchao's layer, which gets the weight in each call; None: emulate."""

    def __init__(self, layer: nn.Module, torchaos: nn.Module | None) -> None:
        super().__init__(layer.forward)
        self.layer, self.torchaos = layer, torchaos

    def __call__(self, input: Tensor) -> Tensor:
        layer: Any = self.layer
        kind, x, weight = input.device.type, input, layer.weight
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        if not x.numel():  # an expert without tokens, and the kernels need a row
            return self.plain(input)  # type: ignore[no-any-return]
        with torch.autocast(kind, enabled=False):
            y = self._product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
            return y if layer.bias is None else y + layer.bias.to(y.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x (N, inputs) times the transposed weight (outputs, inputs)."""
        if self.torchaos is None or x.dtype == torch.float64:
            return _Emulated.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]
        return functional_call(self.torchaos, {"weight": weight}, (x,))  # type: ignore[no-any-return]


def torchao_layer(weight: Tensor, *, emulate: bool = False) -> nn.Module:
    """Return torchao's layer for weights like `weight`, (outputs, inputs). The layer has no weight of its own."""
    from torchao.float8 import convert_to_float8_training

    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    return convert_to_float8_training(plain, config=torchao_config(emulate=emulate))  # type: ignore[no-any-return]


class _Emulated(torch.autograd.Function):
    """Multiplies fp8 numbers for a linear layer, without kernels for them. See torchao's Float8Linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (_rounded(x, by_row=True) @ _rounded(weight, by_row=True).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        back, own = None, None
        if ctx.needs_input_grad[0]:
            back = (_rounded(grad, by_row=True) @ _rounded(weight, by_row=False)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            own = (grad.t() @ x).to(weight.dtype)
        return back, own


def _rounded(x: Tensor, *, by_row: bool) -> Tensor:
    """Return `x` rounded to fp8 numbers times a scale, for each row or for all rows. In float32 or float64."""
    most = x.abs().amax(-1, keepdim=True) if by_row else x.abs().max()
    wide, limit = torch.promote_types(x.dtype, torch.float32), torch.finfo(_FORMAT).max
    scale = (limit / most.double().clamp(min=1e-12)).to(wide)
    return (x.to(wide) * scale).clamp(-limit, limit).to(_FORMAT).to(wide) / scale
