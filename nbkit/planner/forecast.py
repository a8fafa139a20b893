"""Keeps the predictions for a job on disk beside its measurements, so that both can be drawn together.

<run>/telemetry/plan.jsonl has one line for each strategy that the job has had. Rank 0 appends a line when the job
starts, and at each switch. The file has only predictions, no measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nbkit.planner.traffic import Rest, TrafficTerm


@dataclass(frozen=True)
class Term:
    """An operation on an axis in a step, counted as in nbkit.records.readings.TrafficRow.

    calls: the average over ranks. bytes: the size of the tensors that all ranks together give to the operation.
    """

    op: str
    axis: str
    calls: float
    bytes: float


@dataclass(frozen=True)
class Forecast:
    """A prediction for the steps after `step`. memory: bytes at rest of each rank. traffic: empty if unknown.

    peaks: [parameters, gradients, optimizer, activations, working] of each rank, in bytes: see nbkit.planner.peak.Peak.
    Empty if unknown. between: bytes that all ranks send between nodes in a step; None on one node, or if unknown.
    """

    step: int
    strategy: str
    memory: tuple[Rest, ...] = ()
    traffic: tuple[Term, ...] = ()
    between: float | None = None
    peaks: tuple[tuple[int, ...], ...] = ()


def terms_of(every: Sequence[Iterable[TrafficTerm]]) -> tuple[Term, ...]:
    """Return the sum of the terms of all ranks, by operation and axis."""
    sums: dict[tuple[str, str], list[float]] = {}
    for terms in every:
        for term in terms:
            into = sums.setdefault((term.op, term.axis), [0.0, 0.0])
            into[0] += term.calls / len(every)
            into[1] += term.given
    return tuple(Term(op, axis, calls, size) for (op, axis), (calls, size) in sums.items())


def append(run_dir: Path, made: Forecast) -> None:
    """Append `made` to the file as a line. Only rank 0 calls this."""
    path = _path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(made), separators=(",", ":")) + "\n")


def read(run_dir: Path) -> list[Forecast]:
    """Return the forecasts of all lines. A line that is still being written is left out."""
    try:
        lines = _path(run_dir).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
            found.append(
                Forecast(
                    values["step"],
                    values["strategy"],
                    tuple(Rest(**one) for one in values["memory"]),
                    tuple(Term(**one) for one in values["traffic"]),
                    values.get("between"),
                    tuple(tuple(one) for one in values.get("peaks", ())),
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return found


def in_force(of: Sequence[Forecast], step: int) -> Forecast | None:
    """Return the forecast for step number `step`: the newest one that was made before that step."""
    return next((one for one in reversed(of) if one.step < max(step, 1)), None)


def _path(run_dir: Path) -> Path:
    return run_dir / "telemetry" / "plan.jsonl"
