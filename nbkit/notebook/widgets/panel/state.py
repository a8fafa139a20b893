"""The state of the strategy panel as one frozen value, and how each message changes it. No widget in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nbkit.notebook.cluster.control_result import ControlResult

RESULTS_KEPT = 5
PACE_CHANGE = 0.02  # of its seconds: what changes less is not worth another table on the page
Phase = Literal["looking", "none", "idle", "training", "held", "gone"]


@dataclass(frozen=True)
class State:
    """phase: "none" when there is no Trainer yet, "held" when it is paused, "gone" when the ranks do not answer.

    pulse: where the training is (step, strategy, progress). table: what
    nbkit.rank.train.estimate.strategy_table says of the job, {} until it is known. pace: of the strategy in force, as
    its newest steps have it, which the table may not: see nbkit.rank.train.estimate.pace. asked: what is being
    done now, "" for nothing. results: what came of the last ones, newest first.
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
    """A rank has answered; see Training.look."""

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
class Heard:
    """A switch was made from elsewhere, such as a cell: it ends nothing that a panel has asked for."""

    result: ControlResult


News = Looked | Asked | Finished | Heard | Lost


def reduce(state: State, news: News) -> State:
    """The state after the news."""
    match news:
        case Looked(answer):
            return _looked(state, answer)
        case Asked(words):
            return replace(state, asked=words)
        case Finished(result):
            return replace(state, asked="", results=_with(result, state.results))
        case Heard(result):
            return replace(state, results=_with(result, state.results))
        case Lost(why):
            return replace(state, phase="gone", why=why)  # what was asked for ends with a word of its own


def _with(result: ControlResult, others: tuple[ControlResult, ...]) -> tuple[ControlResult, ...]:
    """The newest first. What was heard of ends in the panel that has asked for it too, with the same id."""
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
    ):  # of steps that the old one has too; the rows would never be still
        return False
    least = PACE_CHANGE * old["seconds"]
    return any(abs((new[one] or 0.0) - (old[one] or 0.0)) > least for one in ("seconds", "low", "high"))
