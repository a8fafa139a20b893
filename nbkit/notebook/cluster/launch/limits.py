"""Limits of what one user's clusters may take of a machine together: see nbkit.notebook.cluster.site_settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbkit.errors import UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.launch.device_pinning import Pinning, pins_on
from nbkit.notebook.cluster.machine.machine import Machine
from nbkit.notebook.cluster.registry import Entry
from nbkit.notebook.cluster.site_settings import Site


def pins_within(
    site: Site,
    machine: Machine,
    n: int | None = None,
    gpus: str | None = None,
    *,
    cpu: bool = False,
    spares: int = 0,
) -> Pinning:
    """`pins_on`, of what the user may take; without `n` and `gpus` fewer ranks where all would be too much.

    Raises UsageError as `pins_on` does, and when so much was asked for, or nothing is left.
    """
    plan = pins_on(machine, n, gpus, cpu=cpu, spares=spares)
    entries = [entry for entry in registry.entries() if entry.is_here and not entry.is_spread and entry.is_alive()]
    for key, most, noun, count, held in (
        ("max_ranks", site.max_ranks, "ranks", len(plan.pins), sum(entry.n for entry in entries)),
        ("max_gpus", site.max_gpus, "GPUs", _gpus(plan), len({label for e in entries for label in _labels(e)})),
    ):
        if most is None or count <= most - held:
            continue
        why = f"{key} is {most} in {site.sources[key]}"
        left = most - held - (spares if key == "max_gpus" else 0)
        if n is None and gpus is None and left > 0:
            fewer = pins_within(site, machine, left, cpu=plan.pins[0].kind == "cpu", spares=spares)
            return replace(fewer, notes=(*plan.notes, f"{most - held} of {count} {noun} are taken, since {why}."))
        others = f"; {held} are taken by {', '.join(entry.name for entry in entries)}" if held else ""
        raise UsageError(
            f"One user may not have so many {noun} here.",
            numbers=f"{count} {noun} asked for, {why}{others}",
            hint=_ways_out(left, entries),
        )
    return plan


def _gpus(plan: Pinning) -> int:
    return len({pin.label for pin in (*plan.pins, *plan.spares) if pin.kind == "gpu"})


def _labels(entry: Entry) -> list[str]:
    return [label for label in (*entry.labels, *entry.spares) if label.startswith("GPU")]


def _ways_out(left: int, entries: Sequence[Entry]) -> str:
    ways = [f"-n {left}"] * (left > 0) + [f"%cluster stop {entry.name}" for entry in entries]
    return "   or   ".join(ways)
