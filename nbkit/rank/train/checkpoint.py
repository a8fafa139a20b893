"""Checkpoints: one file, written by rank 0 so that it is whole or not there, read by every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbkit.errors import TrainingError

__all__ = ["agree", "check_fits", "read", "whole_state", "write"]

_FORMAT = 1


def write(path: str | Path, state: dict[str, Any], *, rank: int) -> None:
    """Write `state` to `path` from rank 0: to a file beside it first, then renamed over it.

    Collective. Raises TrainingError on every rank when rank 0 could not write.
    """

    def on_first() -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            with beside.open("wb") as file:
                torch.save({"format": _FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    agree(on_first if rank == 0 else lambda: None, what=f"The checkpoint {str(path)!r} could not be written.")


def read(path: str | Path, *, device: torch.device) -> dict[str, Any]:
    """The state in `path`, on every rank. Collective; raises TrainingError on every rank when one cannot read it."""
    found: dict[str, Any] = {}

    def load() -> None:
        # Only tensors and plain values: a checkpoint from elsewhere cannot run code here.
        found.update(torch.load(path, map_location=device, weights_only=True))
        if found.get("format") != _FORMAT:
            raise ValueError(f"format {found.get('format')!r}, this release reads {_FORMAT}")

    agree(load, what=f"The checkpoint {str(path)!r} could not be read.")
    return found


def check_fits(state: dict[str, Any], *, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises TrainingError when `state` is of another model (names, shapes) or of an optimizer with other groups."""
    held = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    found = {name: tuple(value.shape) for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    if held != found:
        other = [name for name in held if name in found and held[name] != found[name]]
        raise TrainingError(
            "The checkpoint is of another model.",
            numbers=f"missing {sorted(held.keys() - found.keys())[:3]}, "
            f"unexpected {sorted(found.keys() - held.keys())[:3]}"
            + (f"; {other[0]} is {found[other[0]]} there, {held[other[0]]} here" if other else ""),
            hint="build the model that was saved",
        )
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    if here != there:
        raise TrainingError(
            "The checkpoint is of an optimizer with other parameter groups.",
            numbers=f"parameters per group: {there} there, {here} here",
            hint="build the optimizer that was saved",
        )


def agree(act: Callable[[], None], *, what: str) -> None:
    """Run `act` on every rank. Raises TrainingError(`what`) on all of them when it failed on any."""
    failure = ""
    try:
        act()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = [failure]
    if dist.is_initialized() and dist.get_world_size() > 1:
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    failed = [(rank, text) for rank, text in enumerate(failures) if text]
    if failed:
        raise TrainingError(
            what,
            numbers=f"rank {failed[0][0]}: {failed[0][1]}"
            + (f"   (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""),
            hint="a path that every rank sees, with room and rights to write",
        )


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model under its own name, copied to the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
