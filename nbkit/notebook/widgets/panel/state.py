"""The state of the strategy panel as one frozen value, and how each message changes it. No widget in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nbkit.notebook.cluster.control_result import ControlResult

RESULTS_KEPT = 5
Phase = Literal["looking", "none", "idle", "training", "held", "gone"]


@dataclass(frozen=True)
class State:
    """phase: "none" when there is no Trainer yet, "held" when it is paused, "gone" when the ranks do not answer.

    pulse: where the training is (step, strategy, progress). table: what
    nbkit.rank.train.estimate.strategy_table says of the job, {} until it is known. asked: what is being
    done now, "" for nothing. results: what came of the last ones, newest first.
    """

    cluster: str
    ranks: int
    phase: Phase = "looking"
    why: str = ""
    pulse: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    asked: str = ""
    results: tuple[ControlResult, ...] = ()


@dataclass(frozen=True)
class Looked:
    """A rank has answered; see Training.look."""

    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """The user has asked for a control, in words: "switching to zero3"."""

    words: str


@dataclass(frozen=True)
class Finished:
    """A control has ended, with this result."""

    result: ControlResult


@dataclass(frozen=True)
class Lost:
    """The cluster cannot be reached."""

    why: str


News = Looked | Asked | Finished | Lost


def reduce(state: State, news: News) -> State:
    """The state after the news."""
    match news:
        case Looked(answer):
            return _looked(state, answer)
        case Asked(words):
            return replace(state, asked=words)
        case Finished(result):
            return replace(state, asked="", results=(result, *state.results)[:RESULTS_KEPT])
        case Lost(why):
            return replace(state, phase="gone", why=why)  # what was asked for ends with a word of its own


def _looked(state: State, answer: Mapping[str, Any]) -> State:
    if not answer:
        return replace(state, phase="gone", why="the ranks do not answer")
    if not answer["job"]:
        return replace(state, phase="none", why="", pulse={}, table={})
    phase: Phase = "held" if answer["held"] else "training" if answer["training"] else "idle"
    pulse = {key: answer[key] for key in ("step", "strategy", "progress")}
    return replace(state, phase=phase, why="", pulse=pulse, table=answer["table"])
