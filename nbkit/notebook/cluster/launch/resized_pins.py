"""Devices for another number of ranks: a rank that stays keeps its GPU; of CPU ranks the cores are shared anew."""

from __future__ import annotations

from dataclasses import replace

from nbkit.errors import UsageError
from nbkit.notebook.cluster.launch.device_pinning import Pinning, pins_on
from nbkit.notebook.cluster.launch.limits import pins_within
from nbkit.notebook.cluster.machine.machine import Machine
from nbkit.notebook.cluster.site_settings import Site


def resized_pins(site: Site, machine: Machine, now: Pinning, n: int) -> Pinning:
    """The pins of `n` ranks, where those of `now` are. Raises UsageError, with what fits, for more than there are."""
    here = len(now.pins)
    if n < 1:
        raise UsageError("A cluster has at least one rank.", numbers=f"resize {n}", hint="%cluster resize 1")
    machine = _without_reserve(machine, now)
    more = None if n <= here else _more(site, _without(machine, now), now, n)
    if now.pins[0].kind == "cpu":
        return replace(pins_on(machine, n, cpu=True), spares=now.spares, retired=now.retired)
    if more is None:
        return replace(now, pins=now.pins[:n], notes=())
    if more.backend != now.backend:
        raise UsageError(
            "The ranks that are there and the new ones would need different backends.",
            numbers=f"{now.backend} now, {more.backend} for {n - here} more",
            hint=f"%cluster stop   and   %cluster start -n {n}",
        )
    added = tuple(replace(pin, rank=here + index) for index, pin in enumerate(more.pins))
    return replace(now, pins=(*now.pins, *added), notes=more.notes)


def _more(site: Site, machine: Machine, now: Pinning, n: int) -> Pinning:
    here = len(now.pins)
    try:
        return _added(site, machine, now, n)
    except UsageError as error:
        most = here
        while most + 1 < n and _fits(site, machine, now, most + 1):
            most += 1
        hint = f"%cluster resize {most}" if most > here else "%cluster list   shows what holds them"
        raise UsageError(
            f"The cluster cannot grow to {n} ranks. {error.what}", numbers=error.numbers, hint=hint
        ) from error


def _added(site: Site, machine: Machine, now: Pinning, n: int) -> Pinning:
    kind, wanted = now.pins[0].kind, n - len(now.pins)
    found = pins_within(site, machine, wanted, cpu=kind == "cpu")
    if found.pins[0].kind != kind:  # none is left, and CPU ranks would be taken instead
        raise UsageError("More ranks than idle GPUs.", numbers=f"{wanted} more, 0 idle")
    return found


def _fits(site: Site, machine: Machine, now: Pinning, n: int) -> bool:
    try:
        _added(site, machine, now, n)
    except UsageError:
        return False
    return True


def _without_reserve(machine: Machine, now: Pinning) -> Machine:
    """`machine` without the cores in reserve, and without those that a rank was taken off."""
    kept = {core for pin in (*now.spares, *now.retired) if pin.kind == "cpu" for core in pin.cores}
    return replace(machine, cores=tuple(core for core in machine.cores if core not in kept))


def _without(machine: Machine, now: Pinning) -> Machine:
    """`machine` without the GPUs of `now`, which look idle until a rank first computes on them."""
    ours = {pin.env.get("CUDA_VISIBLE_DEVICES") for pin in (*now.pins, *now.spares, *now.retired)}
    left = tuple(gpu for gpu in machine.gpus if gpu.uuid not in ours)
    # Where the CUDA driver alone has counted them, it would count all again.
    return replace(machine, survey=replace(machine.survey, gpus=left, is_installed=True))
