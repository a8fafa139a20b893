"""Optimizer state that rests in host memory: `offload="cpu"`, for a GPU that has no room for it.

A step takes the parameters some at a time: their state goes to the device, the optimizer updates them there, and the
state goes back. So a GPU holds the state of one part, and weights and gradients as ever. Each step moves the bytes of
the state twice over PCIe (for Adam in float32, 8 + 8 bytes per parameter that this rank updates) and waits for them.
The numbers are those of the same optimizer without it. On CPU ranks there is nowhere to go, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.device import accelerator

PART_BYTES = 64 << 20
"""Parameters that are updated at once."""


def offload(optimizer: torch.optim.Optimizer) -> None:
    """From now on `optimizer` keeps what it remembers of each element in host memory. In place.

    Raises TrainingError for an optimizer whose update of some parameters may depend on the others.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            f"offload= updates parameters some at a time, and nothing says that {kind.__name__} may be.",
            numbers=f"it is of {kind.__module__}; torch's own update each parameter by itself",
            hint="torch.optim.AdamW, or offload=None",
        )
    update = optimizer.step

    def step(closure: Any = None) -> None:
        _in_parts(optimizer, update)

    settings: dict[str, Any] = {"step": step, "state_device": torch.device("cpu")}
    optimizer.__dict__.update(settings)


def to_host(optimizer: torch.optim.Optimizer) -> None:
    """Move there what `optimizer` keeps on a device already."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            _put_back(optimizer, p, {})


def _in_parts(optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> None:
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for part in _parts(whole):
            for group, params in zip(groups, part, strict=True):
                group["params"] = params
            at_rest = [(p, key, value) for params in part for p in params for key, value in _fetch(optimizer, p)]
            update()
            hosts = {(id(p), key): host for p, key, host in at_rest}
            for p in (p for params in part for p in params):
                _put_back(optimizer, p, hosts)
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _parts(whole: Sequence[list[nn.Parameter]]) -> Iterator[list[list[nn.Parameter]]]:
    """The parameters of all groups, cut into parts of at most PART_BYTES, or one parameter, each by its group."""
    part: list[list[nn.Parameter]] = [[] for _ in whole]
    size = 0
    for group, params in enumerate(whole):
        for p in params:
            more = p.numel() * p.element_size()
            if size and size + more > PART_BYTES:
                yield part
                part, size = [[] for _ in whole], 0
            part[group].append(p)
            size += more
    if size or not any(whole):
        yield part


def _fetch(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Put the state of `p` beside it; (key, where it rests) of what is kept per element, as a fused step is not."""
    # Without asking the defaultdict, which would make an entry, and the optimizer takes that for its own.
    state = optimizer.state[p] if p in optimizer.state else {}
    resting = [(key, value) for key, value in state.items() if isinstance(value, Tensor) and value.ndim]
    for key, value in resting:
        state[key] = accelerator().send(value, p.device)
    return resting


def _put_back(optimizer: torch.optim.Optimizer, p: nn.Parameter, hosts: dict[tuple[int, str], Tensor]) -> None:
    state = optimizer.state[p] if p in optimizer.state else {}
    for key, value in list(state.items()):
        if not isinstance(value, Tensor) or not value.ndim or not accelerator().holds(value):
            continue
        host = hosts.get((id(p), key))
        if host is None or accelerator().holds(host) or host.shape != value.shape or host.dtype != value.dtype:
            host = accelerator().pinned(value.shape, value.dtype)
        # Waited for: what reads the state next, a checkpoint or a switch, may do so on the host.
        host.copy_(value)
        state[key] = host
