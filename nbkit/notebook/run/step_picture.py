"""One step of a run as the page draws it: numbers only, each measured unless its name says modelled or formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from nbkit.notebook.run import step_timeline
from nbkit.notebook.run.follower import Run, strategy_of
from nbkit.notebook.run.host_health import health
from nbkit.notebook.run.run_timeline import PARTS, short
from nbkit.planner import forecast
from nbkit.records.late_ranks import Bar, Late, late_rank
from nbkit.records.pipeline_links import Link, links, slow_link
from nbkit.records.readings import Row, bars, table, traffic_matrix, usual_bars
from nbkit.records.records import LISTEN_EVERY, StepRecord
from nbkit.records.run_advice import reading


def picture(run: Run, step: int, *, usual: bool = False, replica: int = 0) -> dict[str, Any]:
    """The picture of a step as plain values. Empty but for "step" when no rank has a record of it.

    usual: bars and sentence are of the newest 20 steps up to it, the median of each part: of single steps both would
    change with each. replica: which of the pipelines is drawn, where there are several.
    """
    steps = run.picture_of(step)
    if not steps:
        return {"step": step, "ranks": []}
    first = steps[min(steps)]
    strategy = strategy_of(steps) or (run.headers[min(run.headers)].strategy if run.headers else "")
    # Not every step times its calls; those before do.
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
        # Of a step that was left half-way no rank has parts.
        "seconds": short(fmean(part.seconds for part in shown or steps.values())),
        "ranks": [[bar.rank, short(bar.seconds), *(short(getattr(bar, part)) for part in PARTS)] for bar in shown],
        "of": _words(numbers, "medians" if few else "means"),
        "missing": sorted(set(range(run.world_size)) - set(steps)),
        "reading": reading(shown, rows, slow=slow, alike="speeds=" not in strategy),
        "late": _late(late_rank(shown)),
        "table": [_row(row, predicted) for row in rows],
        "formula": predicted is not None and bool(predicted.traffic),
        "traffic": _traffic(run, steps, predicted),
        "memory": _memory(run, step, forecasts),
        "health": health(run),
        "moments": step_timeline.of_step(run, step, strategy, replica=replica, usual=usual),
        "own": short(fmean(record.own_seconds for record in steps.values())),
        "lost": sum(record.lost for record in steps.values()),
    }


def _words(numbers: Sequence[int], kind: str) -> str:
    first, last = numbers[0], numbers[-1]
    some = f" of {len(numbers)}" if kind == "medians" and len(numbers) <= last - first else ""
    return f"Step {last:,}" if first == last else f"Steps {first:,} to {last:,}, {kind}{some}"


def lateness(run: Run) -> dict[str, Any]:
    """Ranks that the others waited for in the newest steps: rank, number of steps, cause; the most first."""
    found: dict[int, list[Any]] = {}
    for late in run.late:
        if late is not None:
            found.setdefault(late.rank, []).append(late)
    rows = [
        {
            "rank": rank,
            "steps": len(those),
            "cause": those[-1].cause,
        }
        for rank, those in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    return {"of": len(run.late), "rows": rows[:8]}


def _slow_link(run: Run, step: int, rows: list[Row], of: list[Bar]) -> Link | None:
    """The slow link of a pipeline, from the detailed step that is nearest."""
    # Backups are messages too, and hold no pipeline up.
    if not of or not any(row.op == "recv" and row.axis == "pp" for row in rows):
        return None
    details = run.details_near(run.files, step)
    newest = max((one.step for one in details.values()), default=0)
    offsets = {rank: header.offset_ns for rank, header in run.headers.items()}
    every = links({rank: one for rank, one in details.items() if one.step == newest}, offsets)
    return slow_link(every, fmean(bar.seconds for bar in of))


def _late(late: Late | None) -> dict[str, Any] | None:
    """seconds: how much longer its part of the bar is than on the ranks it is compared with."""
    return None if late is None else {"rank": late.rank, "seconds": short(late.longer), "cause": late.cause}


def _row(row: Row, predicted: forecast.Forecast | None) -> dict[str, Any]:
    values = {name: short(getattr(row, name)) for name in Row.__dataclass_fields__}
    # What one rank sends another receives.
    op = "send" if row.op == "recv" else row.op
    terms = predicted.traffic if predicted is not None else ()
    same = [round(term.bytes) for term in terms if (term.op, term.axis) == (op, row.axis)]
    values["bytes"], values["formula_bytes"] = round(row.bytes), same[0] if same else None
    # Both are of the same groups, so that a ring hands on as much of each.
    values["sent"] = round(row.sent)
    values["formula_sent"] = round(row.sent * same[0] / row.bytes) if same and row.sent else None
    return values


def _traffic(run: Run, steps: Mapping[int, StepRecord], predicted: forecast.Forecast | None) -> dict[str, Any]:
    """nodes: bytes within nodes, between them, and between them by the formula; None on one node."""
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
    """[from, to, bytes] where there are any: most ranks talk to few others."""
    return [[i, j, round(size)] for i, row in enumerate(of) for j, size in enumerate(row) if size]


def _memory(run: Run, step: int, forecasts: list[forecast.Forecast]) -> list[dict[str, Any]]:
    """Memory is counted now and then: what is predicted of it is of the strategy under which it was."""
    made = []
    for rank in sorted(run.memory):
        record = run.memory_of(rank, step)
        if record is None:
            continue
        header = run.headers.get(rank)
        predicted = forecast.in_force(forecasts, record.step)
        formula = predicted.memory[rank] if predicted is not None and rank < len(predicted.memory) else None
        made.append(
            {
                "rank": rank,
                "step": record.step,
                "strategy": predicted.strategy if predicted is not None else "",
                "parameters": record.parameters,
                "gradients": record.gradients,
                "optimizer": record.optimizer,
                "buffers": record.buffers,
                "rest": record.rest(header.base_bytes if header else 0),
                "source": record.source,
                "formula": None if formula is None else [formula.parameters, formula.gradients, formula.optimizer],
            }
        )
    return made
