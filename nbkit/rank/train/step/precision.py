"""Compute in the precision of a job: float32 weights, with autocast if asked, and with a loss scale for float16.

float16 loses gradients below 6e-8. So the loss is multiplied by a scale before backward, and the gradients are divided
by it after they were summed over the ranks (Micikevicius et al. 2018). The scale changes as in torch's GradScaler. When
a gradient is not finite, the scale is halved, and all ranks skip the update. After many finite steps it is doubled.
This takes one all-reduce of 4 bytes in each step over all ranks, because every rank holds other gradients. The
optimizer's step waits for the result, as in GradScaler. No other precision waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.torch_private import unscale_
from nbkit.rank.train.step.step_stats import DeviceScalar

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The values of `precision=` besides None."""

_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 2.0**-20


class Precision:
    """The precision of a job. A switch does not change it.

    name: None, or a key of PRECISIONS. scale: the factor of the loss; None if it needs no factor. finite: the number of
    steps since the scale changed. After `growth_interval` steps the scale grows.
    """

    def __init__(self, name: str | None, *, device: torch.device, world_size: int) -> None:
        self.dtype, self.device, self.world_size = PRECISIONS.get(name or ""), device, world_size
        self.scale: float | None = _FIRST_SCALE if self.dtype == torch.float16 else None
        self.finite, self.growth_interval = 0, 2000
        self._work: dist.Work | None = None
        self._found: Tensor | None = None

    def check(self, model: nn.Module) -> None:
        """Warn of bf16 on a GPU without bf16. Raise TrainingError if float16 weights train with a loss scale."""
        self._warn_of_emulation()
        halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
        if self.scale is not None and halves:
            raise TrainingError(
                "precision='fp16' needs float32 weights, but the model has others.",
                numbers=f"{len(halves)} parameters are float16, the first {halves[0]!r}",
                hint="build the model in float32: autocast computes in float16",
            )

    def _warn_of_emulation(self) -> None:
        if self.dtype != torch.bfloat16 or not accelerator().holds(self.device):
            return
        if accelerator().emulates_bf16(self.device):
            name = accelerator().name(self.device)
            warnings.warn(
                f"precision='bf16' is slow here: {name} has no bf16 and computes it in float32. This GPU is made for "
                "precision='fp16'",
                stacklevel=2,
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        # Not torch.autocast(enabled=False): it would disable the caller's own autocast.
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for backward."""
        return loss if self.scale is None else loss * self.scale

    @torch.no_grad()
    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the summed gradients by the scale, and start to ask all ranks if theirs are finite. Collective."""
        if self.scale is None:
            return
        found = torch.zeros((), dtype=torch.float32, device=self.device)
        inverse = torch.full((), 1 / self.scale, dtype=torch.float32, device=self.device)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            if p.grad is not None and p.grad.numel():
                alike.setdefault((p.grad.device, p.grad.dtype), []).append(p.grad)
        for grads in alike.values():
            unscale_(grads, found, inverse)
        self._found = found
        self._work = dist.all_reduce(found, dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None

    @property
    def pending(self) -> bool:
        """Return True if `may_step` was not called yet after `unscale`."""
        return self._found is not None

    def may_step(self) -> bool:
        """Return True if the gradients of all ranks are finite. All ranks get the same result. Waits for the device.

        Also adapts the scale. Raises TrainingError if gradients are not finite even with the smallest scale.
        """
        if self.scale is None or self._found is None:
            return True
        if self._work is not None:
            self._work.wait()
        finite = not bool(DeviceScalar(self._found).read())
        self._found = self._work = None
        if not finite:
            self.scale, self.finite = self.scale / 2, 0
        elif (finite_for := self.finite + 1) == self.growth_interval:
            self.scale, self.finite = self.scale * 2, 0
        else:
            self.finite = finite_for
        if self.scale < _LEAST_SCALE:
            raise TrainingError(
                "The gradients are not finite with any loss scale.",
                numbers=f"loss scale {self.scale:.3g}, after halving it from {_FIRST_SCALE:g}",
                hint="precision='bf16', or look for a division by zero or a logarithm of zero",
            )
        return finite

    def level(self) -> None:
        """Set the same scale on every rank after an interrupted step. Collective."""
        if self.scale is None:
            return
        self._found = self._work = None
        agreed = torch.tensor([self.scale, self.finite], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MIN)
        self.scale, self.finite = float(agreed[0]), int(agreed[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counter, for a checkpoint."""
        return {"scale": self.scale, "finite": self.finite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale from `state`. Does nothing if this job or `state` has no scale."""
        if self.scale is not None and state.get("scale") is not None:
            self.scale, self.finite = float(state["scale"]), int(state["finite"])
