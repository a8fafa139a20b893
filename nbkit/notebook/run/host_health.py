"""The last known state of ranks and hosts: clocks, temperature, power, CPU; slowed GPUs come first."""

from __future__ import annotations

from typing import Any

from nbkit.notebook.run.follower import Run
from nbkit.records.records import GpuHealth, HealthRecord

_RANKS_AT_MOST, _HOSTS_AT_MOST = 8, 4


def health(run: Run) -> dict[str, Any] | None:
    """{"step", "ranks", "more", "hosts", "more_hosts"}; None when nothing has been seen.

    ranks: of many only some, those whose GPU is slowed or hottest; hosts: those with most load. more: what is left out.
    """
    if not run.health:
        return None
    gpus = {gpu.uuid: gpu for one in run.health.values() for gpu in one.gpus}
    ranks = [_rank(rank, one, gpus.get(one.gpu)) for rank, one in sorted(run.health.items())]
    if len(ranks) > _RANKS_AT_MOST:
        ranks.sort(key=lambda row: (not row["slowed"], -(row["celsius"] or 0.0), -row["cpu"], row["rank"]))
    hosts: list[dict[str, Any]] = [
        {
            "host": run.headers[rank].host if rank in run.headers else "",
            "load": _short(one.load),
            "cores": one.cores,
            "mhz": _short(one.mhz),
        }
        for rank, one in sorted(run.health.items())
        if one.cores
    ]
    if len(hosts) > _HOSTS_AT_MOST:
        hosts.sort(key=lambda row: -(row["load"] or 0.0))
    left_out = ranks[_RANKS_AT_MOST:]
    slowed = sum(bool(row["slowed"]) for row in left_out)
    return {
        "step": max(one.step for one in run.health.values()),
        "ranks": ranks[:_RANKS_AT_MOST],
        "more": f"{len(left_out)} ranks more, {slowed or 'none'} of them slowed" if left_out else "",
        "hosts": hosts[:_HOSTS_AT_MOST],
        "more_hosts": max(0, len(hosts) - _HOSTS_AT_MOST),
    }


def _rank(rank: int, one: HealthRecord, gpu: GpuHealth | None) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "cpu": _short(one.cpu), "rss": one.rss, "gpu": gpu is not None}
    for name in ("mhz", "top_mhz", "celsius", "watts", "limit_watts", "busy"):
        row[name] = _short(getattr(gpu, name)) if gpu is not None else None
    return row | {"slowed": gpu.slowed if gpu is not None else ""}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
