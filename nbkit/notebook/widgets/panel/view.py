"""The state of the strategy panel, and its views: plain values for JavaScript, and text.

`State` is one frozen value. `reduce` returns the next state after each message. This module needs no widgets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nbkit.durations import text_of as text_of_seconds
from nbkit.errors import StrategyError
from nbkit.figures import between, figure, seconds, size
from nbkit.notebook.cluster.status import text_table
from nbkit.notebook.cluster.training_control import ControlResult, proof
from nbkit.planner.choose.search import Choice, bounds_of, in_words, recommended
from nbkit.planner.link_speed import ranks_of_node
from nbkit.records.event_words import recorded
from nbkit.strategy import Strategy

RESULTS_KEPT = 5
PACE_CHANGE = 0.02  # of the step's seconds; a smaller change does not update the table on the page
Phase = Literal["looking", "none", "idle", "training", "held", "gone"]


@dataclass(frozen=True)
class State:
    """The state of a cluster's panels.

    phase: "none" if there is no Trainer yet, "held" if it is paused, "gone" if the ranks do not answer. pulse: the
    training's step, strategy and progress. table: the table of nbkit.rank.train.estimate.strategy_table, {} until it is
    known. pace: the step time of the current strategy, measured over its newest steps (the table may be older); see
    nbkit.rank.train.estimate.time_model. asked: the control that runs now, in words, "" for none. results: the results
    of the last controls, newest first.
    """

    cluster: str
    ranks: int
    phase: Phase = "looking"
    why: str = ""
    pulse: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    pace: Mapping[str, Any] = field(default_factory=dict)
    asked: str = ""
    results: tuple[ControlResult, ...] = ()


@dataclass(frozen=True)
class Looked:
    """A rank has answered; see TrainingClient.look."""

    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """The user has asked for a control, in words: "asked to switch to zero3"."""

    words: str


@dataclass(frozen=True)
class Finished:
    """A control has ended, with this result."""

    result: ControlResult


@dataclass(frozen=True)
class Lost:
    """The cluster cannot be reached."""

    why: str


@dataclass(frozen=True)
class SwitchedElsewhere:
    """A switch was requested elsewhere, such as in a cell. A control that a panel has requested goes on."""

    result: ControlResult


News = Looked | Asked | Finished | SwitchedElsewhere | Lost


def reduce(state: State, news: News) -> State:
    """Return the state after the news."""
    match news:
        case Looked(answer):
            return _looked(state, answer)
        case Asked(words):
            return replace(state, asked=words)
        case Finished(result):
            return replace(state, asked="", results=_with(result, state.results))
        case SwitchedElsewhere(result):
            return replace(state, results=_with(result, state.results))
        case Lost(why):
            return replace(state, phase="gone", why=why)  # `asked` stays: a Finished follows


def _with(result: ControlResult, others: tuple[ControlResult, ...]) -> tuple[ControlResult, ...]:
    """Return the results, newest first, without duplicates: a panel's switch is reported as SwitchedElsewhere too."""
    others = tuple(one for one in others if not result.id or one.id != result.id)
    return (result, *others)[:RESULTS_KEPT]


def _looked(state: State, answer: Mapping[str, Any]) -> State:
    if not answer:
        return replace(state, phase="gone", why="the ranks do not answer")
    if not answer["job"]:
        return replace(state, phase="none", why="", pulse={}, table={}, pace={})
    phase: Phase = "held" if answer["held"] else "training" if answer["training"] else "idle"
    pulse = {key: answer[key] for key in ("step", "strategy", "progress")}
    pace = answer["progress"].get("pace") or {}
    pace = {**pace, "step": answer["progress"]["step"]} if pace else {}
    pace = pace if _moved(state.pace, pace) else state.pace
    return replace(state, phase=phase, why="", pulse=pulse, table=answer["table"], pace=pace)


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if not old or not new or old["strategy"] != new["strategy"] or (old["low"] is None) != (new["low"] is None):
        return True
    if (
        0 <= new["step"] - old["step"] < new["steps"]
    ):  # the new pace shares steps with the old one; wait, so that rows do not change all the time
        return False
    least = PACE_CHANGE * old["seconds"]
    return any(abs((new[one] or 0.0) - (old[one] or 0.0)) > least for one in ("seconds", "low", "high"))


_PHASES = {
    "looking": "looking at the ranks …",
    "none": "no Trainer on the ranks yet: trainer = nbkit.Trainer(...)   in a %%distributed cell",
    "idle": "not training",
    "training": "training",
    "held": "paused",
}
_NEAR = 4.0
_NAMED = 4  # strategies; more are counted
_PREDICTED = "predicted"
_REASONS = {
    "fastest": "the fastest of those whose step time is known",
    _PREDICTED: "the fastest of those whose step time is known, by its predicted step",
    "in force": "not measurably slower than {names}, and it runs now",
    "least memory": "not measurably slower than {names}, and it needs the least memory",
}
"""Reasons by the `why` of a Choice."""
_HELD_WORDS = {
    "dp": "a copy on every rank",
    "zero": "optimizer state in parts; zero=2: gradients too; 3: weights too",
    "tp": "a slice of every layer (tp)",
    "pp": "whole blocks, stage by stage (pp)",
    "cp": "a copy on every rank, which computes some of the positions (cp)",
    "mixed": "the model is divided in more than one way",
}
"""Words for the contents of a rank, by family of strategies (see `family_of`)."""


def pulse_view(state: State) -> dict[str, Any]:
    """Return what may change with every step: headline, enabled buttons, results of the last controls."""
    busy = bool(state.asked)
    here = bool(state.table) and state.phase != "gone"
    job, stepping = here and not busy, state.phase in ("training", "held")
    return {
        "phase": state.phase,
        "headline": _headline(state),
        "asked": state.asked,
        "results": [
            {
                "ok": result.ok,
                "line": result.line,
                "hint": result.hint,
                "figures": result.figures,
                "proof": proof(result.result) if result.figures else "",
                "deviations": result.notes[1:],
                "identical": result.result.get("identical") if result.figures else None,
            }
            for result in state.results
        ],
        "can": {
            "apply": job,
            "try": job,
            "measure": job and len(state.table["options"]) > 1,
            "undo": job and bool(state.table.get("previous")),
            "pause": job and state.phase == "training",
            "resume": state.phase == "held" and not busy,
            "save": job,
            "stop": stepping,
        },
    }


def job_view(state: State) -> dict[str, Any]:
    """Return the current job and a row for each possible strategy, or {} until the table is known."""
    table = state.table
    if not table:
        return {}
    limit = table["limit_bytes"]
    options = _with_pace(table, state.pace)
    choice = recommended(options, limit, table["strategy"])
    rows = [_row(row, table, options, choice.strategy) for row in options]
    return {
        "cluster": state.cluster,
        "strategy": table["strategy"],
        "previous": table["previous"] or "",
        "recommended": choice.strategy,
        "because": _reason(options, choice),
        "compared": state.pace.get("strategy") == recorded(table["strategy"]) and state.pace.get("compared", False),
        "unpredicted": table["unpredicted"],
        "unpredicted_pause": table["unpredicted_pause"],
        "levers": _levers(table["levers"]),
        "measure": _to_measure(options, table, limit),
        "arithmetic": table["arithmetic"],
        "ranks": table["ranks"],
        "blocks": [{"name": block["name"], "size": _count(block["parameters"])} for block in table["blocks"]],
        "held": table["held"],
        "family": family_of(table["strategy"]),
        "legend": _HELD_WORDS,
        "nodes": table["nodes"],
        "link": table["link"],
        "limit": size(limit) if limit is not None else "",
        "limit_bytes": limit,
        # Rows keep the order of the table, so that a row keeps its place. Refused strategies are at the end.
        "rows": sorted(rows, key=lambda row: not (row["ok"] or row["untried"])),
    }


def family_of(strategy: str) -> str:
    """Return the family of a strategy: how it divides the model. paint.js gives each family a color.

    "tp", "pp" or "cp" if one of these axes divides the model, "mixed" if several do. Otherwise "zero" if the data axis
    divides the states, and "dp" if it does not. familyOf in paint.js is the same rule.
    """
    keys = {word.partition("=")[0] for word in strategy.split()}
    axes = [axis for axis in ("tp", "pp", "cp") if axis in keys]
    if axes:
        return axes[0] if len(axes) == 1 else "mixed"
    return "zero" if "zero" in keys else "dp"


def checked(state: State, text: str) -> dict[str, Any]:
    """Parse a strategy that the user has typed: {"text", "ok", "strategy", "why"}."""
    try:
        node = ranks_of_node(state.table.get("nodes", ()))
        strategy = Strategy.parse(text, state.table.get("ranks", state.ranks), node=node)
    except StrategyError as error:
        return {"text": text, "ok": False, "strategy": "", "why": f"{error.what} {error.numbers} → {error.hint}"}
    known = next((row for row in state.table.get("options", ()) if row["strategy"] == str(strategy)), None)
    if known is not None and not known["ok"]:
        return {"text": text, "ok": known.get("untried", False), "strategy": str(strategy), "why": known["why"]}
    return {"text": text, "ok": True, "strategy": str(strategy), "why": "; ".join(strategy.without_effect)}


def previewed(state: State, verdict: Mapping[str, Any], option: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict of `checked` with a "row" like those of `job_view`, for a strategy that the table leaves out.

    option: the ranks' prediction for the strategy, {} for none.
    """
    table = state.table
    if not option or not table:
        return dict(verdict)
    row = _row(option, table, _with_pace(table, state.pace), "")
    refused = not option["ok"] and not option["untried"]
    return {**verdict, "row": row, "ok": verdict["ok"] and not refused, "why": verdict["why"] or row["why"]}


def in_table(state: State, strategy: str) -> bool:
    """Return True if the table has a row for the strategy."""
    return any(row["strategy"] == strategy for row in state.table.get("options", ()))


def text_of(state: State) -> str:
    """Return the panel as text, for front ends without widgets."""
    lines = [f"{state.cluster}: {_headline(state)}"]
    job = job_view(state)
    if not job and state.pulse:
        lines.append("what each strategy would cost is being worked out; look again")
    if not job:
        return "\n".join([*lines, *(result.line for result in state.results[:1])])
    cut = next((row["cut"] for row in job["rows"] if row["current"]), "")
    told = "; ".join(words for words in (job["arithmetic"], cut) if words)
    lines += [f"strategy  {job['strategy']}", f"          {told}", "", *_drawing(job), ""]
    lines += _table([row for row in job["rows"] if row["ok"]])
    lines += [f"  {row['strategy']}: {row['why']}" for row in job["rows"] if not row["ok"] and not row["untried"]]
    if unexamined := [row["strategy"] for row in job["rows"] if row["untried"]]:
        lines += [f"  {_UNEXAMINED}, a switch does it first: {'; '.join(unexamined)}"]
    room = [f"limit of a rank {job['limit']}"] * bool(job["limit"]) + [f"link {job['link']}"] * bool(job["link"])
    lines += [f"  {', '.join(room)}; figures with ≈ are predicted, the others measured"] if room else []
    lines += [f"  No step time is predicted: {job['unpredicted']}"] if job["unpredicted"] else []
    if job["recommended"]:
        lines.append(f"  recommended: {job['recommended']}, {job['because']}")
    else:
        lines.append("  nothing is recommended yet: %compare measures strategies")
    lines += [f"  {job['levers']}"] if job["levers"] else []
    for result in state.results[:1]:
        lines += ["", repr(result)]
    undo = f"   %strategy --undo   (back to {job['previous']})" if job["previous"] else ""
    return "\n".join([*lines, "", f"%strategy zero3   switches;   %strategy --try 10 zero3   measures{undo}"])


def _headline(state: State) -> str:
    if state.phase == "gone":
        return state.why or "the ranks do not answer"
    parts = [_PHASES[state.phase]]
    progress = state.pulse.get("progress") or {}
    if state.pulse:
        parts.append(f"step {state.pulse['step']:,}")
    if state.phase in ("training", "held") and progress.get("goal"):
        # While training, the step in progress is shown, not the number of finished steps.
        parts[-1] = f"step {progress['step']:,} of {progress['goal']:,}"
    if "loss" in progress:
        parts.append(f"loss {figure(progress['loss'])}")
    if progress.get("tokens_per_s") and state.phase == "training":
        parts.append(f"{figure(progress['tokens_per_s'])} {progress['unit']}/s")
    if progress.get("eta_s") and state.phase == "training":
        parts.append(f"{text_of_seconds(progress['eta_s'])} to go")
    if progress.get("waits"):
        parts.append(progress["waits"])
    return " · ".join(parts)


def _with_pace(table: Mapping[str, Any], pace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows, with the newest pace in the current strategy's row. The table itself is updated less often."""
    options = _with_distinct_labels(table["options"])
    if not pace or pace["strategy"] != recorded(table["strategy"]):
        return options
    measured = {"step_s": pace["seconds"], "step_low_s": pace["low"], "step_high_s": pace["high"]}
    measured |= {"step_steps": pace["steps"], "step_ago": pace["ago"]}
    return [{**row, **measured} if row["strategy"] == table["strategy"] else row for row in options]


def _with_distinct_labels(options: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows. Labels that are equal get the keys that differ: "hsdp shard=4"."""
    words: dict[str, list[set[str]]] = {}
    for row in options:
        words.setdefault(row["label"], []).append(set(row["strategy"].split()))
    shared = {label: set.intersection(*each) for label, each in words.items() if len(each) > 1}
    return [
        {**row, "label": _label_with_keys(row, shared[row["label"]])} if row["label"] in shared else row
        for row in options
    ]


def _label_with_keys(row: Mapping[str, Any], shared: set[str]) -> str:
    """Return the label with the keys that are not shared, without dp=, which follows from the others."""
    own = [word for word in row["strategy"].split() if word not in shared]
    return " ".join([row["label"], *([word for word in own if not word.startswith("dp=")] or own)])


def _reason(options: Sequence[Mapping[str, Any]], choice: Choice) -> str:
    """Return why the choice is recommended, and which rivals are equal within the noise."""
    names = [row["label"] for row in options if row["strategy"] in choice.rivals]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    best = next((row for row in options if row["strategy"] == choice.strategy), None)
    guess = best is not None and choice.why == "fastest" and best["step_s"] is None
    return _REASONS[_PREDICTED if guess else choice.why].format(names=", ".join(names[:_NAMED]) + more) if best else ""


_UNEXAMINED = "not examined yet"
_MEASURED_STEPS, _MEASURED_AT_MOST = 8, 12


def _to_measure(options: Sequence[Mapping[str, Any]], table: Mapping[str, Any], limit: float | None) -> dict[str, Any]:
    """Return what the button "Measure all that fit" measures: {"strategies", "steps" of each, "label"}, or {}.

    If more than 12 strategies fit, measure only those without a measured step. If these are more than 12, or if every
    strategy has one, measure the 12 that send the fewest bytes.
    """
    now = next((row for row in options if row["strategy"] == table["strategy"]), None)
    room = math.inf if limit is None else limit
    fits = [row for row in options if row["ok"] and row is not now and (row["peak_bytes"] or 0) <= room]
    if now is None or not fits:
        return {}
    unknown = [row for row in fits if row["step_s"] is None]
    some = unknown if unknown and len(fits) > _MEASURED_AT_MOST else fits
    chosen = sorted(some, key=lambda row: row["step_bytes"] or math.inf)[:_MEASURED_AT_MOST]
    what, took = f"{len(chosen)} of {len(fits)} that fit", ""
    if len(chosen) == len(some):
        what = "all that fit" if some is fits else f"the other {len(chosen)}"
    if now["step_s"] is not None:
        # Each strategy has two turns, each with two warm-up steps and a switch to it and back.
        steps = [row["step_s"] or row["predicted_step_s"] or now["step_s"] for row in (now, *chosen)]
        pauses = [row["switch_s"] or 0.0 for row in chosen]
        took = f" (about {text_of_seconds(max(1.0, (_MEASURED_STEPS + 4) * sum(steps) + 4 * sum(pauses)))})"
    names = [row["strategy"] for row in chosen]
    return {"strategies": names, "steps": _MEASURED_STEPS, "label": f"Measure {what}{took}"}


def _row(
    row: Mapping[str, Any], table: Mapping[str, Any], options: Sequence[Mapping[str, Any]], best: str
) -> dict[str, Any]:
    """Return a row for the panel. options: all rows of the table, with the newest pace."""
    memory = row["memory"] or {"now": 0, "during": 0, "after": 0}
    current, limit = row["strategy"] == table["strategy"], table["limit_bytes"]
    most = max((one["memory"]["during"] for one in options if one["ok"]), default=0)
    # With a limit far above all values, all bars would look alike.
    scale = limit if limit is not None and limit <= _NEAR * most else most
    now = next((one for one in options if one["strategy"] == table["strategy"]), None)
    peak = row["peak_bytes"]
    return {
        "strategy": row["strategy"],
        "label": row["label"],
        "ok": row["ok"],
        "untried": row.get("untried", False),
        "why": _UNEXAMINED if row.get("untried") else row["why"] or "",
        "proof": row.get("proof", ""),
        "current": current,
        "recommended": row["strategy"] == best,
        "held": row["held"],
        "family": family_of(row["strategy"]),
        "arithmetic": row["arithmetic"] or "",
        "cut": row["cut"],
        "memory": size(memory["after"]) if row["ok"] else "",
        "memory_part": min(1.0, memory["after"] / scale) if scale else 0.0,
        "during_part": min(1.0, memory["during"] / scale) if scale else 0.0,
        "peak": _bytes(peak, row["peak_counted"]) if row["ok"] else "",
        "tight": limit is not None and max(memory["during"], peak or 0) > limit,
        "memory_words": _memory_words(memory, current=current)
        + (f" At the peak of a step it holds {_bytes(peak, row['peak_counted'])}." if peak is not None else "")
        + (f" It has room for {size(limit)}." if limit is not None else ""),
        "sends": _bytes(row["step_bytes"], row["sent_counted"]) if row["ok"] else "",
        "between": f"≈ {size(row['between_bytes'])}" if row["ok"] and row.get("between_bytes") is not None else "",
        "moved": "" if current or not row["ok"] else size(row["moved_bytes"]),
        "pause": "" if current or not row["ok"] else seconds(row["switch_s"]),
        "step": _step(row) if row["ok"] else "",
        "predicted": _predicted(row) if row["ok"] and row["step_s"] is not None else "",
        "margin": _margin(row) if row["ok"] else "",
        "interval": _interval(row) if row["ok"] else "",
        "payback": "" if current or now is None else _payback(row["switch_s"], row, now),
        "values": _values(row, now, current=current) if row["ok"] else {},
    }


def _values(row: Mapping[str, Any], now: Mapping[str, Any] | None, *, current: bool) -> dict[str, float | None]:
    """Return the numbers of a row, for sorting and for the picture. None means unknown or infinite."""
    measured = row["step_s"] is not None
    low, high = bounds_of(row) if measured else (None, None)
    back = None if current or now is None else _steps_back(row["switch_s"], row, now)
    return {
        "memory": row["memory"]["after"],
        "peak": row["peak_bytes"],
        "between": row.get("between_bytes"),
        "step": row["step_s"] if measured else row["predicted_step_s"],
        "low": low or None,
        "high": high if high is not None and math.isfinite(high) else None,
        "sends": row["step_bytes"],
        "moved": None if current else row["moved_bytes"],
        "pause": None if current else row["switch_s"],
        "payback": back if back is not None and math.isfinite(back) else None,
    }


def _memory_words(memory: Mapping[str, int], *, current: bool) -> str:
    if current:
        return f"The fullest rank holds {size(memory['now'])} between steps."
    now, during, after = (size(memory[when]) for when in ("now", "during", "after"))
    return (
        f"Between steps the fullest rank holds {now} now and {after} after the switch, and {during} while it switches."
    )


def _step(row: Mapping[str, Any]) -> str:
    """Return the step time, with a ≈ if it is predicted."""
    return seconds(row["step_s"]) if row["step_s"] is not None else _predicted(row) or seconds(None)


def _bytes(value: float | None, counted: bool) -> str:
    """Return bytes as text, with a ≈ if they are predicted."""
    return size(value) if counted or value is None else f"≈ {size(value)}"


def _predicted(row: Mapping[str, Any]) -> str:
    predicted = row["predicted_step_s"]
    return f"≈ {seconds(predicted)}" if predicted is not None else ""


def _levers(found: Mapping[str, Any]) -> str:
    """Return a sentence about keys that would make the current strategy faster, or ""."""
    if not found:
        return ""
    return f"{found['strategy']} waits for its link: ≈ {seconds(found['step_s'])} a step. {in_words(found['each'])}"


def _margin(row: Mapping[str, Any]) -> str:
    """Return the interval of the median step time, the number of steps, and how old they are; "" if not measured."""
    if row["step_s"] is None:
        return ""
    count, ago = f"of {_steps(row['step_steps'])}", row["step_ago"]
    count += f", {_steps(ago)} ago" if ago else ""
    return f"{_interval(row)} {count}".strip()


def _interval(row: Mapping[str, Any]) -> str:
    """Return the interval of the median step time; "" if it is not known."""
    if row["step_s"] is None:
        return ""
    low, high = bounds_of(row)
    return "" if math.isinf(high) else between(low, high)


def _payback(pause: float | None, row: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the number of steps after which a switch has paid for its pause, in words; "" if it is not known."""
    steps = _steps_back(pause, row, now)
    if steps is None:
        return ""
    if math.isnan(steps):
        return "within noise"
    return "never" if math.isinf(steps) else _steps(int(steps))


def _steps_back(pause: float | None, row: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Return that number: infinity for never, NaN if the intervals of the step times overlap, None if unknown."""
    step, step_now = (one["step_s"] if one["step_s"] is not None else one["predicted_step_s"] for one in (row, now))
    if pause is None or step is None or step_now is None:
        return None
    (low, high), (low_now, high_now) = (
        bounds_of(one) if one["step_s"] is not None else (one["predicted_step_s"],) * 2 for one in (row, now)
    )
    if low < high_now and low_now < high:
        return math.nan
    if step >= step_now:
        return math.inf
    return max(float(math.ceil(pause / (step_now - step) - 1e-6)), 1.0)


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _drawing(job: Mapping[str, Any]) -> list[str]:
    """Return lines that show how much of each block (row) each rank (column) holds, in eighths. Gaps separate nodes."""
    eighths = "·▁▂▃▄▅▆▇█"
    width = max(len(block["name"]) for block in job["blocks"]) if job["blocks"] else 0
    held, nodes = job["held"], job["nodes"]
    gaps = ["  " if rank and nodes[rank] != nodes[rank - 1] else "" for rank in range(job["ranks"])]
    lines = []
    if any(gaps):
        starts = [rank for rank, gap in enumerate(gaps) if gap or not rank]
        ends = [*starts[1:], job["ranks"]]
        names = (f"node {nodes[a]}".ljust(3 * (b - a) + 1) for a, b in zip(starts, ends, strict=True))
        lines.append(f"{'':<{width}}  {' '.join(names)}".rstrip())
    lines.append(f"{'rank':<{width}}  {' '.join(f'{gap}{rank % 100:<2}' for rank, gap in enumerate(gaps))}".rstrip())
    for place, block in enumerate(job["blocks"]):
        shown = (
            gap + eighths[_eighth(held["rows"][row][place])] * 2 for gap, row in zip(gaps, held["ranks"], strict=True)
        )
        lines.append(f"{block['name']:<{width}}  {' '.join(shown)}  {block['size']}")
    return [*lines, f"{'':<{width}}  {job['legend'][job['family']]}"]


def _eighth(fraction: float) -> int:
    return 0 if fraction <= 0 else max(1, round(8 * min(1.0, fraction)))


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = (
        "strategy",
        "memory",
        "peak",
        "step",
        "margin",
        "predicted",
        "sends",
        "between",
        "moved",
        "pause",
        "payback",
    )
    heads = (
        "strategy",
        "memory per rank",
        "at the peak",
        "step",
        "",
        "",
        "sent in a step",
        "between nodes",
        "to move",
        "pause",
        "pays back in",
    )
    shown = [place for place, key in enumerate(columns) if key != "between" or any(row[key] for row in rows)]
    cells = [[row[columns[place]] for place in shown] for row in rows]
    table = text_table([heads[place] for place in shown], cells)
    marks = ["  ", *("* " if row["current"] else "→ " if row["recommended"] else "  " for row in rows)]
    return [mark + line for mark, line in zip(marks, table.splitlines(), strict=True)]


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f}"
