"""Inside one step: the pipeline as planned and as measured, or what each rank did from moment to moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbkit.errors import NbkitError
from nbkit.notebook.run.follower import Run
from nbkit.planner.reshard.placement import orders
from nbkit.records.records import Detail, PipelineOp
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

_KINDS = "FBIW"
_LAPS_AT_MOST = 160  # of a rank: more than a screen shows apart
_RANKS_AT_MOST = 64

Drawn = list[Any]  # [kind, stage, micro, start, stop] with times in seconds since the first


def of_step(run: Run, step: int, strategy: str, *, replica: int = 0, usual: bool = False) -> dict[str, Any] | None:
    """The moments of the step nearest to `step` that was kept in detail; None when none was.

    usual: of the few that were kept last the one that took nearest to what the newest steps take.
    kind "pipeline": planned and measured operations of one replica's ranks, and the bubble of both. kind "laps":
    states of the training thread. Times in seconds on rank 0's clock.
    """
    step = run.usual_detail(step) if usual else step
    chosen = _strategy(strategy, run.world_size)
    if chosen is not None and chosen.pp > 1:
        groups = _lines(run, step, chosen)
        ranks = groups[min(max(replica, 0), len(groups) - 1)]
        details = run.details_near(ranks, step)
        if len(details) == len(ranks) and all(one.pipeline for one in details.values()):
            return _pipeline(run, chosen, ranks, details) | {"replicas": len(groups)}
    details = run.details_near(list(run.files)[:_RANKS_AT_MOST], step)
    return _laps(run, details) if details else None


def _lines(run: Run, step: int, strategy: Strategy) -> list[tuple[int, ...]]:
    """The ranks of each pipeline. In which order the job has its ranks, the messages of one of them tell."""
    first = min(run.files, default=0)
    detail = run.detail_of(first, step)
    peers = {call.peer for call in detail.calls if call.peer is not None} if detail is not None else set()
    found = [order.mesh for order in orders(strategy)]
    return next((mesh for mesh in found if peers <= set(mesh.ranks("pp", first))), found[0]).groups("pp")


def _strategy(text: str, world_size: int) -> Strategy | None:
    try:
        return Strategy.parse(text, world_size)
    except NbkitError:
        return None


def _pipeline(run: Run, strategy: Strategy, ranks: Sequence[int], details: dict[int, Detail]) -> dict[str, Any]:
    measured = {rank: [op for op in details[rank].pipeline if op.op in _KINDS] for rank in ranks}
    begin = min(_aligned(run, rank, op.start_ns) for rank in ranks for op in measured[rank])
    rows: list[list[Drawn]] = [
        [
            [
                op.op,
                op.stage,
                op.micro,
                _seconds(_aligned(run, rank, op.start_ns) - begin),
                _seconds(_aligned(run, rank, op.stop_ns) - begin),
            ]
            for op in measured[rank]
        ]
        for rank in ranks
    ]
    span = max(row[-1][4] for row in rows if row)
    busy = sum(op[4] - op[3] for row in rows for op in row)
    made = {
        "kind": "pipeline",
        "step": details[ranks[0]].step,
        "ranks": list(ranks),
        "schedule": strategy.schedule,
        "measured": rows,
        "measured_span": span,
        "measured_bubble": round(1 - busy / (span * len(ranks)), 4) if span else 0.0,
        "planned": None,
    }
    every = [op for rank in ranks for op in measured[rank]]
    return made | (_planned(strategy, every) or {})


def _planned(strategy: Strategy, ops: Sequence[PipelineOp]) -> dict[str, Any] | None:
    """The same schedule without transfers and delays, at the mean cost that each stage was measured to have."""
    microbatches = 1 + max(op.micro for op in ops)
    stages = 1 + max(op.stage for op in ops)
    try:
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, microbatches, max(1, stages // strategy.pp))
        cost = {kind: _costs(kind, ops, schedule.num_stages) for kind in _KINDS}
        if not schedule.splits:  # a B is whole, and counted as all input
            cost["I"], cost["W"] = cost["B"], [0.0] * schedule.num_stages
        timeline = simulate(schedule, forward=cost["F"], backward_input=cost["I"], backward_weight=cost["W"])
    except (NbkitError, ZeroDivisionError):
        return None
    return {
        "planned": [
            [[span.op.kind, span.op.stage, span.op.micro, _short(span.start), _short(span.stop)] for span in row]
            for row in timeline.spans
        ],
        "planned_span": _short(timeline.makespan),
        "planned_bubble": round(timeline.bubble, 4),
    }


def _costs(kind: str, ops: Sequence[PipelineOp], num_stages: int) -> list[float]:
    def mean(those: list[PipelineOp]) -> float:
        return sum(op.stop_ns - op.start_ns for op in those) / 1e9 / len(those) if those else 0.0

    of_kind = [op for op in ops if op.op == kind]
    return [mean([op for op in of_kind if op.stage == stage]) for stage in range(num_stages)]


def _laps(run: Run, details: dict[int, Detail]) -> dict[str, Any]:
    newest = max(detail.step for detail in details.values())
    details = {rank: one for rank, one in details.items() if one.step == newest and one.laps}
    if not details:
        return {"kind": "laps", "step": newest, "ranks": [], "measured": [], "measured_span": 0.0}
    begin = min(_aligned(run, rank, one.laps[0][1]) for rank, one in details.items())
    span = max(_aligned(run, rank, one.laps[-1][2]) for rank, one in details.items()) - begin
    rows = [_thinned(run, rank, detail, begin, span) for rank, detail in details.items()]
    return {
        "kind": "laps",
        "step": newest,
        "ranks": list(details),
        "measured": rows,
        "measured_span": _seconds(span),
    }


def _thinned(run: Run, rank: int, detail: Detail, begin: int, span: int) -> list[Drawn]:
    """Neighbours of one state are one; what is too short to be seen joins the one before."""
    rows: list[Drawn] = []
    least = span / _LAPS_AT_MOST / 2
    for state, start, stop in detail.laps:
        first, last = _aligned(run, rank, start) - begin, _aligned(run, rank, stop) - begin
        if rows and (rows[-1][0] == state or last - first < least):
            rows[-1][4] = _seconds(last)
        else:
            rows.append([state, 0, 0, _seconds(first), _seconds(last)])
    return rows


def _aligned(run: Run, rank: int, ns: int) -> int:
    header = run.headers.get(rank)
    return header.aligned(ns) if header is not None else ns


def _seconds(ns: int) -> float:
    return _short(ns / 1e9)


def _short(value: float) -> float:
    return round(value, 6)
