"""Layers that send each token to a few of many experts, which no strategy here splits."""

from __future__ import annotations

from torch import nn

_ROUTERS = {"gate", "router", "gating", "gate_network", "wg"}


def experts_in(model: nn.Module) -> str:
    """Name of the first mixture of experts in `model`, by its parts: experts beside a router; "" without one."""
    for name, part in model.named_modules():
        inside = {child for child, _ in part.named_children()} | set(part._parameters)
        if "experts" in inside and inside & _ROUTERS:
            return name or type(part).__name__
    return ""
