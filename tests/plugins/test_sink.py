"""Test that a sink from outside gets every event of a training once, and can neither stop nor delay it."""

from __future__ import annotations

import gc
import json
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import flat, mean_loss, net, points, quiet
from ranks import run_ranks

from nbkit import prepare
from nbkit.errors import TrainingError
from nbkit.rank.telemetry import sinks as sinks_module
from nbkit.rank.telemetry.sinks import AbsentSink, InThread
from nbkit.rank.train.replace import hand_over
from tests.plugins.json_lines import JsonLines


def trained(world: Any, folder: Path) -> list[dict[str, Any]]:
    trainer = quiet(sinks=[JsonLines(folder / f"rank{world.place.rank}.jsonl")], name="mine")
    trainer.fit(2)
    trainer.switch("zero3")
    trainer.fit(1)
    history = trainer.history
    del trainer
    gc.collect()
    return history


def test_a_sink_on_rank_0_gets_every_step_and_event(tmp_path: Path) -> None:
    history, _ = run_ranks(trained, 2, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert not (tmp_path / "rank1.jsonl").exists()
    first, *events, last = lines
    assert (first["kind"], first["name"], first["strategy"], first["world_size"]) == ("open", "mine", "dp=2", 2)
    assert first["parameters"] == flat(net()).numel() and last == {"kind": "close"}
    kinds = ["run_started", "step", "step", "run_stopped", "switch", "run_started", "step", "run_stopped"]
    assert [event["kind"] for event in events] == kinds
    assert [event["loss"] for event in events if event["kind"] == "step"] == [record["loss"] for record in history]


class Raises:
    def write(self, event: dict[str, Any]) -> None:
        raise ConnectionError("the tracker is away")


class Sleeps:
    def __init__(self) -> None:
        self.written = 0

    def write(self, event: dict[str, Any]) -> None:
        time.sleep(0.5)
        self.written += 1


def beside_bad_sinks(world: Any) -> tuple[list[str], int, int, int]:
    sinks_module._LAST_SECONDS = 0.2
    slow = Sleeps()
    trainer = quiet(sinks=[Raises(), slow])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(30)
        made, written = trainer.step, slow.written
        trainer.fit(2)
    return [str(one.message) for one in caught], made, written, trainer.step


def test_a_failing_sink_warns_once_and_a_slow_sink_delays_no_step() -> None:
    (said, made, written, step) = run_ranks(beside_bad_sinks, 1)[0]
    named = "nothing more is given to the sink Raises: ConnectionError: the tracker is away"
    assert sum(line.startswith(named) for line in said) == 1
    assert any("not everything is given to the sink Sleeps" in line for line in said)
    assert made == 30 and step == 32 and written < 15


def looped(world: Any, path: Path) -> int:
    job = prepare(net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, log_dir=None,
                  sinks=[JsonLines(path)])  # fmt: skip
    loader = torch.utils.data.DataLoader(points(), batch_size=8)
    for batch in job.batches(loader):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.step


def test_a_loop_with_prepare_has_sinks_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    steps = run_ranks(looped, 1, path)[0]
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("step") == steps > 1


def refused(world: Any) -> str:
    with pytest.raises(TrainingError, match=r"sinks= must be a list(.|\n)*sinks=\[Sleeps\(...\)\]"):
        quiet(sinks=Sleeps())
    with pytest.raises(TrainingError, match=r"A sink must have a method write\(event\)") as raised:
        quiet(sinks=[JsonLines])
    return str(raised.value)


def test_a_sink_class_instead_of_an_object_is_refused() -> None:
    assert "sinks=[JsonLines()]" in run_ranks(refused, 1)[0]


class Unpicklable(Raises):
    def __reduce__(self) -> Any:
        raise TypeError("a connection")


def test_a_new_rank_0_gets_the_sinks_that_can_be_pickled(tmp_path: Path) -> None:
    kept = JsonLines(tmp_path / "events.jsonl")
    job: Any = SimpleNamespace(rank=1, sinks=(kept, Unpicklable(), AbsentSink("Tracker")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hand_over._sinks_for_new(job, first=True) == [kept, AbsentSink("Unpicklable"), AbsentSink("Tracker")]
        said = [str(one.message) for one in caught]
        hand_over._sinks_for_new(job, first=False)
    assert len(caught) == len(said) == 2
    assert (
        "the sink Unpicklable gets no more events: rank 0 is a new process; it cannot be" in said[0]
        and "a connection" in said[0]
    )
    assert said[1] == "the sink Tracker gets no more events: rank 0 is a new process; no remaining rank has it"
    # Rank 0 keeps its open sinks, and the new process knows about them.
    opened: Any = SimpleNamespace(rank=0, sinks=(InThread(kept),))
    assert hand_over._sinks_for_new(opened, first=False) == [AbsentSink("JsonLines")]
