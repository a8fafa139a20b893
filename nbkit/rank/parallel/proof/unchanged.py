"""Running a model to look at it, so that afterwards it is as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nbkit.rank.rng.seeding import generators_kept


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Buffers, gradients, modes, what is frozen and random generators are afterwards as before.

    Meanwhile HF models keep no cache, and attention is plain.
    """
    buffers = [
        (part, name, b, b.clone()) for part in module.modules() for name, b in part._buffers.items() if b is not None
    ]
    params = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    cached = torch.is_autocast_cache_enabled()
    configs = {id(c): c for part in module.modules() if getattr(c := getattr(part, "config", None), "use_cache", False)}
    with generators_kept([p.device for p, _, _ in params]), plain_attention():
        for config in configs.values():
            config.use_cache = False  # type: ignore[union-attr]
        for p, _, _ in params:
            p.grad = None
        # A tied weight that autocast casts once would go around the cuts of a pipeline.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for config in configs.values():
                config.use_cache = True  # type: ignore[union-attr]
            for part, mode in modes:
                part.training = mode
            for p, trained, grad in params:
                p.grad = grad
                if p.requires_grad != trained:
                    p.requires_grad_(trained)
            with torch.no_grad():
                for part, name, buffer, value in buffers:
                    part._buffers[name] = buffer.copy_(value)


@contextmanager
def plain_attention() -> Iterator[None]:
    """nn.TransformerEncoder calls its layers, and those their parts, in evaluation too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def thaw(module: nn.Module) -> None:
    """Every parameter is trained, within `unchanged`: the graph tells what hangs on frozen ones, too."""
    for p in module.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
