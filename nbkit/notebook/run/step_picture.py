"""The numbers of one step of a run, for drawing. They are measured unless the name contains "modelled" or "formula".

`of_step` returns the inside of one step: the pipeline, planned and measured, or each rank's states over time. `health`
returns the last known state of ranks and hosts: clocks, temperature, power, CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from statistics import fmean
from typing import Any

from nbkit.errors import NbkitError
from nbkit.notebook.run.follower import PARTS, Run, short, strategy_of
from nbkit.planner import forecast
from nbkit.planner.exchange import orders
from nbkit.records.event_words import recorded, without_experts
from nbkit.records.readings import Bar, Late, TrafficRow, bars, busiest, late_rank, table, traffic_matrix, usual_bars
from nbkit.records.records import (
    LISTEN_EVERY,
    MEMORY_KINDS,
    Detail,
    GpuHealth,
    HealthRecord,
    MemoryRecord,
    PipelineOp,
    StepRecord,
)
from nbkit.records.run_advice import PipelineLink, links, reading, slow_link
from nbkit.schedules import Schedule, simulate
from nbkit.strategy import Strategy

_KINDS = "FBIW"
_LAPS_AT_MOST = 160  # of a rank; more cannot be seen on a screen
_RANKS_AT_MOST = 64

Drawn = list[Any]  # [kind, stage, micro, start, stop] with times in seconds since the first


def of_step(run: Run, step: int, strategy: str, *, replica: int = 0, usual: bool = False) -> dict[str, Any] | None:
    """Return the inside of the step nearest to `step` that was recorded in detail; None if there is none.

    usual: take one of the last few detailed steps, whose duration is nearest to that of the newest steps. kind
    "pipeline": planned and measured operations of the ranks of one replica, and both bubbles. kind "laps": states of
    the training thread. Times are in seconds on rank 0's clock.
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
    """Return the ranks of each pipeline. One rank's messages show in which order the job places ranks."""
    first = min(run.files, default=0)
    detail = run.detail_of(first, step)
    peers = {call.peer for call in detail.calls if call.peer is not None} if detail is not None else set()
    found = [order.mesh for order in orders(strategy)]
    return next((mesh for mesh in found if peers <= set(mesh.ranks("pp", first))), found[0]).groups("pp")


def _strategy(text: str, world_size: int) -> Strategy | None:
    try:
        return Strategy.parse(without_experts(text), world_size)
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
    """Return the schedule without transfers and delays, with the mean measured seconds of each stage."""
    microbatches = 1 + max(op.micro for op in ops)
    stages = 1 + max(op.stage for op in ops)
    try:
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, microbatches, max(1, stages // strategy.pp))
        cost = {kind: _costs(kind, ops, schedule.num_stages) for kind in _KINDS}
        if not schedule.splits:  # B is not split; count it as the backward of the input
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
    details = {rank: one for rank, one in details.items() if one.step == newest}
    details = {rank: replace(one, laps=one.inside) for rank, one in details.items() if one.inside}
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
    """Return a rank's states. Merge equal neighbors, and add a span that is too short to see to the one before."""
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


_RANKS_IN_HEALTH, _HOSTS_AT_MOST = 8, 4
_MODULES = 12  # at most, parts of the peak that are listed


def health(run: Run) -> dict[str, Any] | None:
    """Return {"step", "ranks", "more", "hosts", "more_hosts"}; None if nothing has been recorded.

    ranks: if there are many, only those with slowed or the hottest GPUs. hosts: if there are many, those with the most
    load. more: words about the ranks that are left out, or "". more_hosts: how many hosts are left out.
    """
    if not run.health:
        return None
    gpus = {gpu.uuid: gpu for one in run.health.values() for gpu in one.gpus}
    ranks = [_rank(rank, one, gpus.get(one.gpu)) for rank, one in sorted(run.health.items())]
    if len(ranks) > _RANKS_IN_HEALTH:
        ranks.sort(key=lambda row: (not row["slowed"], -(row["celsius"] or 0.0), -row["cpu"], row["rank"]))
    hosts: list[dict[str, Any]] = [
        {
            "host": run.headers[rank].host if rank in run.headers else "",
            "load": _four_digits(one.load),
            "cores": one.cores,
            "mhz": _four_digits(one.mhz),
        }
        for rank, one in sorted(run.health.items())
        if one.cores
    ]
    if len(hosts) > _HOSTS_AT_MOST:
        hosts.sort(key=lambda row: -(row["load"] or 0.0))
    left_out = ranks[_RANKS_IN_HEALTH:]
    slowed = sum(bool(row["slowed"]) for row in left_out)
    return {
        "step": max(one.step for one in run.health.values()),
        "ranks": ranks[:_RANKS_IN_HEALTH],
        "more": f"{len(left_out)} ranks more, {slowed or 'none'} of them slowed" if left_out else "",
        "hosts": hosts[:_HOSTS_AT_MOST],
        "more_hosts": max(0, len(hosts) - _HOSTS_AT_MOST),
    }


def _rank(rank: int, one: HealthRecord, gpu: GpuHealth | None) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "cpu": _four_digits(one.cpu), "rss": one.rss, "gpu": gpu is not None}
    for name in ("mhz", "top_mhz", "celsius", "watts", "limit_watts", "busy"):
        row[name] = _four_digits(getattr(gpu, name)) if gpu is not None else None
    return row | {"slowed": gpu.slowed if gpu is not None else ""}


def _four_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def picture(run: Run, step: int, *, usual: bool = False, replica: int = 0) -> dict[str, Any]:
    """Return the picture of a step as plain values. If no rank has recorded the step, it has only "step".

    usual: bars and sentence are medians of the newest 20 steps up to this one, because those of single steps would
    change all the time. replica: the pipeline to draw, if there are several.
    """
    steps = run.picture_of(step)
    if not steps:
        return {"step": step, "ranks": []}
    first = steps[min(steps)]
    strategy = recorded(strategy_of(steps) or (run.headers[min(run.headers)].strategy if run.headers else ""))
    # Only some steps time their calls, so look at earlier steps too.
    before = (run.picture_of(one) for one in range(step - 1, max(step - LISTEN_EVERY, 0), -1))
    alike = (one for one in before if strategy_of(one) == strategy_of(steps))
    of, rows = bars(steps, run.members), table(steps, run.members, near=alike)
    few = run.near(step) if usual else []
    shown = usual_bars(few, run.members) or of
    numbers = [one[min(one)].step for one in few] or [first.step - first.span + 1, first.step]
    slow = _slow_link(run, step, rows, of)
    forecasts = forecast.read(run.folder)
    predicted = forecast.in_force(forecasts, step)
    return {
        "step": first.step,
        "asked": step,
        "span": first.span,
        "strategy": strategy,
        "numbers": {key: short(value) for key, value in first.numbers.items()},
        "hosts": [run.headers[rank].host if rank in run.headers else "" for rank in range(run.world_size)],
        # After an aborted step, no rank has its parts.
        "seconds": short(fmean(part.seconds for part in shown or steps.values())),
        "ranks": [[bar.rank, short(bar.seconds), *(short(getattr(bar, part)) for part in PARTS)] for bar in shown],
        "of": _words(numbers, "medians" if few else "means"),
        "missing": sorted(set(range(run.world_size)) - set(steps)),
        "reading": reading(shown, rows, slow=slow, alike="speeds=" not in strategy),
        "late": _late(late_rank(shown)),
        "table": [_row(row, predicted) for row in rows],
        "formula": predicted is not None and bool(predicted.traffic),
        "sent": round(busiest(steps, run.members)),
        "traffic": _traffic(run, steps, predicted),
        "memory": _memory(run, step, forecasts),
        "health": health(run),
        "experts": _experts(run, steps),
        "moments": of_step(run, step, strategy, replica=replica, usual=usual),
        "own": short(fmean(record.own_seconds for record in steps.values())),
        "lost": sum(record.lost for record in steps.values()),
    }


def _words(numbers: Sequence[int], kind: str) -> str:
    first, last = numbers[0], numbers[-1]
    some = f" of {len(numbers)}" if kind == "medians" and len(numbers) <= last - first else ""
    return f"Step {last:,}" if first == last else f"Steps {first:,} to {last:,}, {kind}{some}"


def lateness(run: Run) -> dict[str, Any]:
    """Return the ranks that others waited for in the newest steps: rank, number of steps, cause; most steps first."""
    found: dict[int, list[Any]] = {}
    for late in run.late:
        if late is not None:
            found.setdefault(late.rank, []).append(late)
    rows = [
        {
            "rank": rank,
            "steps": len(those),
            "cause": "nbkit" if those[-1].by_nbkit else those[-1].cause,
        }
        for rank, those in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    return {"of": len(run.late), "rows": rows[:8]}


def _experts(run: Run, steps: Mapping[int, StepRecord]) -> dict[str, Any] | None:
    """Return the number of tokens of each expert on each rank, and the imbalance of all steps; None without experts."""
    ranks = {rank: step.experts for rank, step in sorted(steps.items()) if step.experts}
    if not ranks:
        return None
    return {
        "ranks": [[rank, [[int(n), short(tokens)] for n, tokens in each.items()]] for rank, each in ranks.items()],
        "imbalance": [[step, short(uneven)] for step, uneven in run.curve.imbalance],
    }


def _slow_link(run: Run, step: int, rows: list[TrafficRow], of: list[Bar]) -> PipelineLink | None:
    """Return the slow link of a pipeline in the nearest detailed step."""
    # Backups are messages too, but they do not delay a pipeline.
    if not of or not any(row.op == "recv" and row.axis == "pp" for row in rows):
        return None
    details = run.details_near(run.files, step)
    newest = max((one.step for one in details.values()), default=0)
    offsets = {rank: header.offset_ns for rank, header in run.headers.items()}
    every = links({rank: one for rank, one in details.items() if one.step == newest}, offsets)
    return slow_link(every, fmean(bar.seconds for bar in of))


def _late(late: Late | None) -> dict[str, Any] | None:
    """Return the late rank. seconds: how much longer its part takes than on the ranks that it is compared with."""
    return (
        None
        if late is None
        else {"rank": late.rank, "seconds": short(late.longer), "cause": "nbkit" if late.by_nbkit else late.cause}
    )


def _row(row: TrafficRow, predicted: forecast.Forecast | None) -> dict[str, Any]:
    values = {name: short(getattr(row, name)) for name in TrafficRow.__dataclass_fields__}
    # Count a receive as the peer's send.
    op = "send" if row.op == "recv" else row.op
    terms = predicted.traffic if predicted is not None else ()
    same = [round(term.bytes) for term in terms if (term.op, term.axis) == (op, row.axis)]
    values["bytes"], values["formula_bytes"] = round(row.bytes), same[0] if same else None
    # Both are of the same groups, so the ratio of sent to passed bytes is the same.
    values["sent"] = round(row.sent)
    values["formula_sent"] = round(row.sent * same[0] / row.bytes) if same and row.sent else None
    return values


def _traffic(run: Run, steps: Mapping[int, StepRecord], predicted: forecast.Forecast | None) -> dict[str, Any]:
    """Return the traffic between ranks.

    nodes: bytes within nodes, between them, and between them by the formula; None on one node.
    """
    matrix = traffic_matrix(steps, run.members, run.world_size)
    found: dict[str, Any] = {"sent": _cells(matrix.sent), "modelled": _cells(matrix.modelled), "nodes": None}
    hosts = [run.headers[rank].host if rank in run.headers else "" for rank in range(len(matrix.sent))]
    if len(set(hosts)) > 1:
        sums = [0, 0]
        for i, j, size in (*found["sent"], *found["modelled"]):
            sums[hosts[i] != hosts[j]] += size
        formula = predicted.between if predicted is not None else None
        found["nodes"] = {"within": sums[0], "between": sums[1], "formula": formula and round(formula)}
    return {"world": len(matrix.sent), **found}


def _cells(of: tuple[tuple[float, ...], ...]) -> list[list[int]]:
    """Return [from, to, bytes] of the nonzero cells, because most ranks send to few others."""
    return [[i, j, round(size)] for i, row in enumerate(of) for j, size in enumerate(row) if size]


def _memory(run: Run, step: int, forecasts: list[forecast.Forecast]) -> list[dict[str, Any]]:
    """Return the memory of each rank. The prediction is for the strategy under which the memory was measured.

    growth: bytes that the process has grown since before the job; None on a device. kinds: bytes at the peak by kind
    (`records.MEMORY_KINDS`), whose sum is the peak; None if only the sum is known. modules: the largest parts of the
    peak, [kind, module, bytes]; of many ranks only for the fullest one. planned: the predicted peak, see
    `Forecast.peaks`; None if unknown.
    """
    made: list[dict[str, Any]] = []
    fullest = max(run.memory, key=lambda rank: _peak_of(run.memory_of(rank, step)), default=0)
    for rank in sorted(run.memory):
        record = run.memory_of(rank, step)
        if record is None:
            continue
        header = run.headers.get(rank)
        predicted = forecast.in_force(forecasts, record.step)
        formula = predicted.memory[rank] if predicted is not None and rank < len(predicted.memory) else None
        planned = predicted.peaks[rank] if predicted is not None and rank < len(predicted.peaks) else None
        kinds = {kind: sum(part.bytes for part in record.named if part.kind == kind) for kind in MEMORY_KINDS}
        kinds["other"] += max(record.peak - sum(kinds.values()), 0)
        told = len(run.memory) <= _RANKS_IN_HEALTH or rank == fullest
        made.append(
            {
                "rank": rank,
                "step": record.step,
                "strategy": recorded(predicted.strategy) if predicted is not None else "",
                "parameters": record.parameters,
                "gradients": record.gradients,
                "optimizer": record.optimizer,
                "buffers": record.buffers,
                "at_rest": record.at_rest,
                "activations": record.activations,
                "peak": record.peak if record.activations is not None else None,
                "growth": record.now - header.base_bytes if header and record.source == "storages" else None,
                "formula": None if formula is None else list(astuple(formula)),
                "kinds": kinds if record.named else None,
                "modules": [[part.kind, part.module, part.bytes] for part in record.named[:_MODULES]] if told else [],
                "planned": None if planned is None else list(planned),
            }
        )
    return made


def _peak_of(record: MemoryRecord | None) -> int:
    return record.peak if record is not None else 0
