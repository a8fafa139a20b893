"""Pin each rank to one GPU by its UUID, or to a share of the CPU cores, and record the reason.

`plan_pins` is a pure function of the machine's devices, so the code for GPUs is tested without GPUs. `pins_on` calls it
for a Machine. Nothing here imports torch.

`repinned` returns the current devices of a running cluster, because a rank may have moved to a spare device.
`resized_pins` plans another number of ranks: a rank that stays keeps its GPU, and CPU cores are divided again.
`pins_within` applies a user's limits; see nbkit.notebook.cluster.site_settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from nbkit.device_kinds import BACKENDS, CPU, GLOO, NVIDIA
from nbkit.errors import UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.machine.gpus import Gpu, choose_gpus, visible_gpus
from nbkit.notebook.cluster.machine.machine import Machine, share_cores, share_cores_near, show_cores
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.site_settings import Site

_CPU_RANKS_WITHOUT_N = 2


@dataclass(frozen=True)
class Pin:
    """The device of one rank.

    env: variables to set before torch is imported or CUDA is used. cores: for os.sched_setaffinity. threads: for
    torch.set_num_threads. label: the device in tables. why: the reason for the choice, for people.
    """

    rank: int
    kind: Literal["gpu", "cpu"]
    env: Mapping[str, str]
    cores: tuple[int, ...]
    threads: int
    label: str
    why: str

    def __post_init__(self) -> None:
        if self.rank < 0 or self.threads < 1 or not self.cores or not self.why:
            raise UsageError(
                "A pin needs a rank, at least one core and thread, and a reason.",
                numbers=f"rank {self.rank}, cores {self.cores}, threads {self.threads}, why {self.why!r}",
            )

    @property
    def saved(self) -> dict[str, Any]:
        """Return the pin as JSON for the parent of the ranks; see nbkit.bridge.parent.spec.RankPin."""
        places = {"env": dict(self.env), "cores": list(self.cores), "threads": self.threads}
        return {**places, "label": self.label, "why": self.why}


@dataclass(frozen=True)
class Pinning:
    """The pins of all ranks in rank order, their backend, and notes for the user.

    spares: spare devices, numbered after the ranks. retired: devices from which ranks were moved.
    """

    pins: tuple[Pin, ...]
    backend: str
    notes: tuple[str, ...] = ()
    spares: tuple[Pin, ...] = ()
    retired: tuple[Pin, ...] = ()

    def __post_init__(self) -> None:
        if [pin.rank for pin in self.pins] != list(range(len(self.pins))) or not self.pins:
            raise UsageError("Pins go from rank 0 up without a gap.", numbers=f"{[pin.rank for pin in self.pins]}")

    @property
    def device(self) -> str:
        """Return the kind of device on which ranks compute, as torch names it."""
        return NVIDIA if self.pins[0].kind == "gpu" else CPU


def pins_on(
    machine: Machine, n: int | None = None, gpus: str | None = None, *, cpu: bool = False, spares: int = 0
) -> Pinning:
    """Call `plan_pins` for `machine`. Raises UsageError like `plan_pins`."""
    return plan_pins(
        n,
        gpus,
        machine.gpus,
        machine.cores,
        machine.env.get("CUDA_VISIBLE_DEVICES"),
        cpu=cpu,
        own_pid=os.getpid(),
        quota=machine.quota,
        spares=spares,
    )


def plan_pins(
    n: int | None,
    gpus: str | None,
    found: Sequence[Gpu],
    cores: Sequence[int],
    visible: str | None,
    *,
    cpu: bool = False,
    own_pid: int | None = None,
    quota: float | None = None,
    spares: int = 0,
) -> Pinning:
    """Pin `n` ranks.

    n: number of ranks. None means one per idle GPU; one in all if others use GPUs; two CPU ranks if no GPU is idle.
    gpus: the user's list ("2,3", "0,0", "1:0" for a MIG instance), used as given, even if busy. found: all GPUs of the
    machine; unfit ones get no rank. cores: the cores that the job may use. visible: CUDA_VISIBLE_DEVICES, None if not
    set. cpu: use no GPU. own_pid: this notebook's kernel, whose memory on a GPU does not make it busy. quota: the CPU
    limit of the container in cores, None without one; it limits the threads. spares: number of extra devices without a
    rank: the last ones of `gpus`, or cores that ranks then do not get.

    Raises UsageError if n is not positive, larger than the number of idle GPUs, or not the length of `gpus`; if an
    entry of `gpus` names no GPU; if both `gpus` and `cpu` are given; if no device is left for a spare.
    """
    if n is not None and n < 1:
        raise UsageError("A cluster has at least one rank.", numbers=f"-n {n}", hint="-n 1")
    if spares < 0:
        raise UsageError("This number of spares is not possible.", numbers=f"--spares {spares}", hint="--spares 1")
    if cpu and gpus is not None:
        raise UsageError(
            "The options list GPUs, but ask for CPU ranks.",
            numbers=f"--gpus {gpus} together with --cpu",
            hint=f"--gpus {gpus}   or   --cpu",
        )
    if cpu:
        return _on_cores(n, cores, quota, "asked for with --cpu", (), spares)
    if gpus is not None:
        listed = _listed(n, gpus, found, visible, spares)
        return _on_gpus(listed, cores, quota, "asked for with --gpus", own_pid, (), spares)
    allowed = visible_gpus(found, visible)
    if not allowed:
        reason = f"CUDA_VISIBLE_DEVICES={visible!r} leaves none of {len(found)} GPUs" if found else "no GPU found"
        return _on_cores(n, cores, quota, reason, (f"CPU ranks: {reason}.",) if found else (), spares)
    unfit = [gpu.unfit for gpu in allowed if gpu.unfit]
    if len(unfit) == len(allowed):
        return _on_cores(n, cores, quota, unfit[0].why, (), spares)
    allowed = [gpu for gpu in allowed if not gpu.unfit]
    idle = [gpu for gpu in allowed if not gpu.in_use_by_others(own_pid)]
    shared = len(idle) < len(allowed)
    notes = tuple(
        f"GPU {gpu.number} ({gpu.name}) is in use and left alone: {use}. To take it all the same: --gpus {gpu.number}"
        for gpu in allowed
        if (use := gpu.in_use_by_others(own_pid))
    )
    if visible is not None and any(map(str.isdigit, visible.split(","))) and len({gpu.name for gpu in found}) > 1:
        notes = (f"CUDA_VISIBLE_DEVICES={visible} is read in nvidia-smi's order; the GPUs here differ.", *notes)
    if n is None and not idle:
        return _on_cores(n, cores, quota, f"none of {len(allowed)} GPUs is idle", notes, spares)
    if spares and (n or 1) + spares > len(idle):
        raise _uneven(n or 1, spares, len(idle), f"idle of {len(allowed)} GPUs")
    if n is not None and n > len(idle):
        raise _too_many(n, allowed, idle, notes)
    if n is None and shared and len(idle) > 1 + spares:
        most = len(idle) - spares
        notes += (f"One GPU is taken, since others use GPUs here. {len(idle)} are idle: -n {most} takes them.",)
        n = 1
    return _on_gpus(idle[: n and n + spares], cores, quota, "idle", own_pid, notes, spares)


def _uneven(
    n: int, spares: int, there: int, of_what: str, what: str = "Too few devices for the ranks and their spares."
) -> UsageError:
    ways = [f"-n {n} --spares {there - n}"] if there > n else []
    ways += [f"-n {there - spares} --spares {spares}"] if there > spares else []
    numbers = f"{_counted(n, 'rank')} and {_counted(spares, 'spare')}, {there} {of_what}"
    return UsageError(what, numbers=numbers, hint="   or   ".join(ways or [f"-n {there}   without --spares"]))


def _listed(n: int | None, gpus: str, found: Sequence[Gpu], visible: str | None, spares: int) -> list[Gpu]:
    if not found:
        raise UsageError("This machine shows no NVIDIA GPU.", numbers=f"--gpus {gpus}, 0 GPUs found", hint="--cpu")
    chosen = choose_gpus(found, gpus, visible)
    for gpu in chosen:
        if gpu.unfit:
            what = f"No rank can compute on GPU {gpu.number} ({gpu.name})."
            raise UsageError(what, numbers=gpu.unfit.why, hint=f"{gpu.unfit.fix}   or   --cpu")
    if spares and (spares >= len(chosen) or n not in (None, len(chosen) - spares)):
        raise _uneven(
            n or 1, spares, len(chosen), f"GPUs in --gpus {gpus}", "One GPU is listed per rank and per spare."
        )
    if n is not None and not spares and n != len(chosen):
        fitting = ",".join(chosen[rank % len(chosen)].number for rank in range(n))
        raise UsageError(
            "One GPU is listed per rank.",
            numbers=f"{n} ranks, {len(chosen)} GPUs in --gpus {gpus}",
            hint=f"-n {len(chosen)} --gpus {gpus}   or   -n {n} --gpus {fitting}",
        )
    return chosen


def _too_many(n: int, allowed: Sequence[Gpu], idle: Sequence[Gpu], notes: Sequence[str]) -> UsageError:
    numbers = f"{n} ranks, {len(idle)} idle of {len(allowed)} GPUs"
    # Only the user may choose one of these: ranks that share a GPU cannot use NCCL, and using a busy one disturbs its
    # owner.
    offer = idle or allowed
    shared = ",".join(offer[rank % len(offer)].number for rank in range(n))
    remark = "ranks share a GPU, over gloo" if n > len(offer) else "in use by others"
    ways = [f"-n {len(idle)}"] if idle else []
    ways += [f"--gpus {shared} ({remark})", "--cpu"]
    return UsageError("More ranks than idle GPUs.", numbers="\n  ".join((numbers, *notes)), hint="   or   ".join(ways))


def _on_gpus(
    chosen: Sequence[Gpu],
    cores: Sequence[int],
    quota: float | None,
    reason: str,
    own_pid: int | None,
    notes: tuple[str, ...],
    spares: int,
) -> Pinning:
    count = len(chosen) - spares
    if any(sum(gpu.chip == spare.chip for gpu in chosen) > 1 for spare in chosen[count:]):
        numbers = [gpu.number for gpu in chosen]
        chips = {gpu.chip: gpu.number for gpu in chosen}
        fewer = min(spares, len(chips) - 1)
        raise UsageError(
            "A spare needs a GPU that no rank uses. If a shared GPU fails, the spare fails too.",
            numbers=f"for ranks: GPU {', '.join(numbers[:count])}; spare: GPU {', '.join(numbers[count:])}",
            hint=f"--gpus {','.join(chips.values())}{f' --spares {fewer}' * (fewer > 0)}",
        )
    shares = share_cores_near([gpu.near for gpu in chosen], cores)
    pins = tuple(
        Pin(
            rank,
            "gpu",
            {"CUDA_VISIBLE_DEVICES": gpu.uuid},
            share,
            _threads(share, count, quota),
            f"GPU {gpu.number} {gpu.name}",
            f"GPU {gpu.number} ({gpu.uuid}): {reason}{', a spare' * (rank >= count)}; "
            f"{show_cores(share)} of {len(cores)}{_near(gpu, share, cores)}",
        )
        for rank, (gpu, share) in enumerate(zip(chosen, shares, strict=True))
    )
    told = [*notes]
    for gpu in dict.fromkeys(chosen):
        own = next((process for process in gpu.processes if process.pid == own_pid), None)
        if own is not None:
            told.append(f"This notebook's own kernel uses GPU {gpu.number}: {own}.")
        if reason != "idle" and (use := gpu.in_use_by_others(own_pid)):
            told.append(f"GPU {gpu.number} is taken though it is in use: {use}.")
    doubled = _doubled(chosen[:count])
    shared = "" if all(gpu.slot is not None for gpu in chosen) else "; memory is shared"
    told += [f"{text}: gloo instead of NCCL, which refuses that{shared}." for text in doubled]
    told += _crowding(len(chosen), cores, quota)
    return Pinning(pins[:count], GLOO if doubled else BACKENDS[NVIDIA], tuple(told), pins[count:])


def _near(gpu: Gpu, share: Sequence[int], cores: Sequence[int]) -> str:
    """Return a note if the rank has only cores of its GPU's socket, and there are others; else ""."""
    return ", on its socket" if {*share} <= {*gpu.near} and not {*cores} <= {*gpu.near} else ""


def _doubled(chosen: Sequence[Gpu]) -> list[str]:
    """Return a sentence for each physical GPU with more than one rank."""
    ranks_on: dict[str, list[int]] = {}
    for rank, gpu in enumerate(chosen):
        ranks_on.setdefault(gpu.chip, []).append(rank)
    return [
        f"Ranks {', '.join(map(str, ranks))} are on one physical GPU ({chosen[ranks[0]].index})"
        for ranks in ranks_on.values()
        if len(ranks) > 1
    ]


def _on_cores(
    n: int | None, cores: Sequence[int], quota: float | None, reason: str, notes: tuple[str, ...], spares: int
) -> Pinning:
    count = _CPU_RANKS_WITHOUT_N if n is None else n
    pins = []
    for rank, share in enumerate(_shares(count, spares, cores)):
        threads = _threads(share, count, quota)
        where = show_cores(share)
        spare = ", a spare" * (rank >= count)
        why = f"CPU: {reason}{spare}; {where} of {len(cores)}, {_counted(threads, 'thread')}"
        pins.append(Pin(rank, "cpu", {"CUDA_VISIBLE_DEVICES": ""}, share, threads, where, why))
    left = len(cores) - sum(len(pin.cores) for pin in pins[count:])
    return Pinning(tuple(pins[:count]), GLOO, (*notes, *_crowding(count, cores, quota, left)), tuple(pins[count:]))


def _shares(count: int, spares: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide the cores. Ranks may have to share cores. A spare gets its own, because shared cores fail together."""
    if not spares or count + spares <= len(cores):
        return share_cores(count + spares, cores)
    if spares >= len(cores):
        raise _uneven(1, spares, len(cores), "CPU cores")
    return share_cores(count, cores[:-spares]) + [(core,) for core in cores[-spares:]]


def _threads(share: Sequence[int], count: int, quota: float | None) -> int:
    """Return the number of threads of a rank: one per core, but no more than the container's quota allows.

    Above its quota, a container has all its threads suspended for a while.
    """
    return len(share) if quota is None else max(1, min(len(share), int(quota / count)))


def _crowding(count: int, cores: Sequence[int], quota: float | None, left: int | None = None) -> list[str]:
    """Return notes about ranks that share cores, and about a container's quota. left: cores that are not for spares."""
    told, left = [], len(cores) if left is None else left
    if count > left:
        told.append(f"{count} ranks share {_counted(left, 'core')}, 1 thread each.")
    if quota is not None and quota < len(cores):
        told.append(
            f"This container is granted the time of {quota:.3g} of {len(cores)} cores: threads are bounded by it."
        )
    return told


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def pinning_of(entry: ClusterEntry) -> Pinning:
    """Return the pinning of a running cluster, so that a restart uses the same devices."""
    spec = json.loads((entry.folder / "spec.json").read_text())
    kind: Literal["gpu", "cpu"] = "cpu" if spec["device"] == CPU else "gpu"

    def pins(saved: list[dict[str, Any]], first: int = 0) -> tuple[Pin, ...]:
        return tuple(
            Pin(first + i, kind, p["env"], tuple(p["cores"]), p["threads"], p["label"], p["why"])
            for i, p in enumerate(saved)
        )

    ranks = pins(spec["pins"])
    spares, retired = pins(spec["spares"], len(ranks)), pins(spec["retired"])
    return Pinning(ranks, spec["backend"], spares=spares, retired=retired)


def repinned(entry: ClusterEntry) -> ClusterEntry:
    """Return the entry with the current devices of its ranks.

    For other hosts, the coordinator has written them to a file.
    """
    if entry.is_spread:
        told = progress.read(entry.folder)
        if told is None or told.phase != "forked":
            return entry
        return replace(entry, labels=told.labels, reasons=told.reasons, spares=told.spares)
    with suppress(OSError, ValueError):
        now = pinning_of(entry)
        labels, reasons = tuple(pin.label for pin in now.pins), tuple(pin.why for pin in now.pins)
        return replace(entry, labels=labels, reasons=reasons, spares=tuple(pin.label for pin in now.spares))
    return entry


def pins_within(
    site: Site,
    machine: Machine,
    n: int | None = None,
    gpus: str | None = None,
    *,
    cpu: bool = False,
    spares: int = 0,
) -> Pinning:
    """Call `pins_on` within the user's limits. Without `n` and `gpus`, reduce the number of ranks to fit.

    Raises UsageError like `pins_on`, and if the requested number is above the limits, or nothing is left.
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
            f"One user may not have this many {noun} here.",
            numbers=f"{count} {noun} asked for, {why}{others}",
            hint=_ways_out(left, entries),
        )
    return plan


def _gpus(plan: Pinning) -> int:
    return len({pin.label for pin in (*plan.pins, *plan.spares) if pin.kind == "gpu"})


def _labels(entry: ClusterEntry) -> list[str]:
    return [label for label in (*entry.labels, *entry.spares) if label.startswith("GPU")]


def _ways_out(left: int, entries: Sequence[ClusterEntry]) -> str:
    ways = [f"-n {left}"] * (left > 0) + [f"%cluster stop {entry.name}" for entry in entries]
    return "   or   ".join(ways)


def resized_pins(site: Site, machine: Machine, now: Pinning, n: int) -> Pinning:
    """Return the pins of `n` ranks, given the current pins.

    Raises UsageError, with a number that fits, if there are too few devices.
    """
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
            "The present ranks and the new ranks would need different backends.",
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
    if found.pins[0].kind != kind:  # no GPU is left, so CPU ranks were planned
        raise UsageError("More ranks than idle GPUs.", numbers=f"{wanted} more, 0 idle")
    return found


def _fits(site: Site, machine: Machine, now: Pinning, n: int) -> bool:
    try:
        _added(site, machine, now, n)
    except UsageError:
        return False
    return True


def _without_reserve(machine: Machine, now: Pinning) -> Machine:
    """Return `machine` without the cores of spares and of retired devices."""
    kept = {core for pin in (*now.spares, *now.retired) if pin.kind == "cpu" for core in pin.cores}
    return replace(machine, cores=tuple(core for core in machine.cores if core not in kept))


def _without(machine: Machine, now: Pinning) -> Machine:
    """Return `machine` without the GPUs of `now`, which look idle until a rank computes on them."""
    ours = {pin.env.get("CUDA_VISIBLE_DEVICES") for pin in (*now.pins, *now.spares, *now.retired)}
    left = tuple(gpu for gpu in machine.gpus if gpu.uuid not in ours)
    # is_installed keeps the CUDA driver's list, which has all GPUs, from being used.
    return replace(machine, survey=replace(machine.survey, gpus=left, is_installed=True))
