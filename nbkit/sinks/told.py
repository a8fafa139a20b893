"""Turns an event into something that a tracker can log: the numbers of a step, or a line of text."""

from __future__ import annotations

import importlib.util
from typing import Any

from nbkit.errors import UsageError
from nbkit.records.events import StepDone

_NOT_TOLD = ("kind", "step", "seconds", "tokens", "samples")


def numbers(event: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a step by name; {} for other events.

    They are the numbers of the step's entry of `history` (loss, lr, grad_norm, values that the loop logs, ...), and:
    step_seconds; tokens_per_second and samples_per_second, of all ranks together; memory_bytes and memory_peak_bytes,
    of rank 0's device, or of its process if it computes on the CPU.
    """
    if event["kind"] != StepDone.kind:
        return {}
    # An import at the top would load torch in the notebook's process too.
    from nbkit.rank.device import accelerator
    from nbkit.rank.telemetry.health import bytes_held
    from nbkit.rank.world import world

    here = world.current()
    now, peak, _ = bytes_held(None if here is None else accelerator().device(here.place.device))
    found = {name: float(value) for name, value in event.items() if name not in _NOT_TOLD and _is_number(value)}
    seconds = event["seconds"] or float("nan")
    rates = {f"{what}_per_second": event[what] / seconds for what in ("tokens", "samples") if event.get(what)}
    return {**found, **rates, "step_seconds": event["seconds"], "memory_bytes": now, "memory_peak_bytes": peak}


def line(event: dict[str, Any]) -> str:
    """Return an event as a line, if it is not a step: "switch: old dp=2, new dp=2 zero=3, ..."; "" for a step."""
    if event["kind"] == StepDone.kind:
        return ""
    told = {name: value for name, value in event.items() if name not in ("kind", "step") and value not in ("", None)}
    return f"{event['kind']}: " + ", ".join(f"{name} {value}" for name, value in told.items())


def require(package: str) -> None:
    """Raise UsageError if a tracker's package is not installed."""
    if importlib.util.find_spec(package) is None:
        hint = f"pip install {package}"
        raise UsageError(f"{package} is not installed.", numbers=f"nbkit.sinks.{package} needs it", hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
