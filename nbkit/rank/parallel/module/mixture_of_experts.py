"""Layers that send each token to a few of many experts, which no strategy here splits."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_ROUTERS = {"gate", "router", "gating", "gate_network", "wg"}


def experts_in(model: nn.Module) -> str:
    """Name of the first mixture of experts in `model`; "" without one."""
    return next((name or type(model).__name__ for name in mixtures(model)), "")


def mixtures(model: nn.Module) -> list[str]:
    """Paths of the mixtures of experts in `model`, by their parts: experts beside a router."""
    found = []
    for name, part in model.named_modules():
        inside = {child for child, _ in part.named_children()} | set(part._parameters)
        if "experts" in inside and inside & _ROUTERS:
            found.append(name)
    return found


def within(path: str, mixtures: Iterable[str]) -> bool:
    """Whether `path` is one of `mixtures`, or inside of one."""
    return any(not mixture or path == mixture or path.startswith(f"{mixture}.") for mixture in mixtures)
