"""Events survive the way through JSON unchanged."""

from __future__ import annotations

import json

import pytest

from nbkit.errors import UsageError
from nbkit.records.events import Checkpointed, Event, LrChanged, RunStarted, RunStopped, StepDone, from_json, to_json


@pytest.mark.parametrize(
    "event",
    [
        StepDone(3, record={"loss": 0.1 + 0.2, "strategy": "dp=2"}),
        RunStarted(0, strategy="dp=4", arithmetic="global 64 = micro 8 x accum 2 x dp 4", total=500),
        RunStopped(7, reason="stopped"),
        LrChanged(5, old=0.1, new=1e-4),
        Checkpointed(5, path="a/b.pt", action="loaded"),
    ],
)
def test_an_event_comes_back_equal(event: Event) -> None:
    line = to_json(event)

    assert "\n" not in line and json.loads(line)["kind"] == event.kind
    assert from_json(line) == event


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="party"):
        from_json('{"kind": "party", "step": 1}')
