"""Test nbkit.sinks on a real training of two ranks: the real libraries read back what was stored.

`pip install 'nbkit-train[trackers]'` installs the trackers. The test of a tracker that is missing is skipped.
"""

from __future__ import annotations

import csv
import gc
import importlib.util
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import quiet
from ranks import run_ranks

from nbkit import sinks
from nbkit.errors import UsageError
from nbkit.sinks.csv import COLUMNS

CURVES = ("loss", "lr", "samples_per_second", "memory_bytes", "memory_peak_bytes")


def trained(world: Any, make: Any, env: dict[str, str]) -> list[dict[str, Any]]:
    """Train with a switch and a change of lr, and return rank 0's history."""
    os.environ.update(env)
    trainer = quiet(sinks=[make()], name="mine")
    trainer.fit(2)
    trainer.switch("zero3")
    trainer.lr = 0.05
    trainer.fit(2)
    history = trainer.history
    del trainer
    gc.collect()
    return history


def needs(package: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed: pip install 'nbkit-train[trackers]'")


class Csv:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> Any:
        return sinks.CSV(self.path)


def test_csv_has_a_row_for_each_step_and_event_and_a_later_run_is_appended(tmp_path: Path) -> None:
    history, _ = run_ranks(trained, 2, Csv(tmp_path / "deep" / "loss.csv"), {})
    with (tmp_path / "deep" / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))

    steps = [row for row in rows if not row["event"]]
    assert [float(row["loss"]) for row in steps] == [record["loss"] for record in history]
    assert [row["strategy"] for row in steps] == ["dp=2", "dp=2", "dp=2 zero=3", "dp=2 zero=3"]
    assert [float(row["lr"]) for row in steps] == [0.1, 0.1, 0.05, 0.05]
    rates = [record["samples"] / record["seconds"] for record in history]
    assert [float(row["samples_per_second"]) for row in steps] == pytest.approx(rates)
    assert all(1e7 < float(row["memory_bytes"]) <= float(row["memory_peak_bytes"]) < 1e11 for row in steps)
    texts = [row["event"] for row in rows if row["event"]]
    assert any(text.startswith("switch: old dp=2, new dp=2 zero=3, moved_bytes") for text in texts)
    assert any(text.startswith("lr_changed: old 0.1, new 0.05") for text in texts)

    run_ranks(trained, 1, Csv(tmp_path / "deep" / "loss.csv"), {})
    lines = (tmp_path / "deep" / "loss.csv").read_text().splitlines()
    assert len(lines) > len(rows) + 4 and lines.count(",".join(COLUMNS)) == 1


def in_wandb() -> Any:
    return sinks.WandB(project="tests", mode="offline", dir=os.environ["WANDB_DIR"])


@needs("wandb")
def test_wandb_offline_has_curves_over_the_step_and_the_strategy(tmp_path: Path) -> None:
    env = {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(tmp_path)}
    history, _ = run_ranks(trained, 2, in_wandb, env)
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = list(_wandb_rows(stored))

    curves = [row for kind, row in found if kind == "history" and "loss" in row]
    assert [(row["step"], row["loss"]) for row in curves] == [(one["step"], one["loss"]) for one in history]
    assert all(set(CURVES) <= set(row) for row in curves)
    assert any(row.get("event", "").startswith("switch: old dp=2") for _, row in found)
    config = [row["strategy"] for kind, row in found if kind in ("run", "config") and "strategy" in row]
    assert (config[0], config[-1]) == ("dp=2", "dp=2 zero=3")
    assert any(kind == "exit" for kind, _ in found)


def _wandb_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, values) of each record of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block of 32 KiB ends with zeros where no header fits
            at += left
        size, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(whole)
            whole, kind = b"", record.WhichOneof("record_type") or ""
            config = record.run.config if kind == "run" else record.config
            items = record.history.item if kind == "history" else config.update
            yield kind, {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def in_mlflow() -> Any:
    return sinks.MLflow("tests", tracking_uri=os.environ["TEST_STORE"])


@needs("mlflow")
def test_mlflow_has_curves_events_and_parameters_in_a_file_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    env = {"TEST_STORE": f"file:{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    history, _ = run_ranks(trained, 2, in_mlflow, env)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=env["TEST_STORE"])
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    loss = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert loss == {one["step"]: one["loss"] for one in history}
    assert set(CURVES) <= set(run.data.metrics)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert (run.data.params["strategy"], run.data.params["world_size"]) == ("dp=2", "2")
    assert any(name.endswith(" step 2") and text.startswith("switch: ") for name, text in run.data.tags.items())


def in_trackio() -> Any:
    return sinks.Trackio("tests")


@needs("trackio")
def test_trackio_has_curves_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    history, _ = run_ranks(trained, 2, in_trackio, {"TRACKIO_DIR": str(tmp_path)})
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tests", "mine")
    curves = [row for row in rows if "loss" in row]
    assert [(row["step"], row["loss"]) for row in curves] == [(one["step"], one["loss"]) for one in history]
    assert all(set(CURVES) <= set(row) for row in curves)
    assert any(row.get("event", "").startswith("switch: old dp=2") for row in rows)


@pytest.mark.parametrize(("kind", "package"), [("WandB", "wandb"), ("MLflow", "mlflow"), ("Trackio", "trackio")])
def test_a_missing_tracker_is_reported_before_the_training(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(UsageError, match=f"{package} is not installed(.|\n)*pip install"):
        getattr(sinks, kind)()


def test_a_sink_can_be_pickled_for_the_process_that_replaces_rank_0(tmp_path: Path) -> None:
    for made in (sinks.CSV(tmp_path / "a.csv"), *_trackers()):
        assert type(pickle.loads(pickle.dumps(made))) is type(made)


def _trackers() -> Iterator[Any]:
    for kind, package in (("WandB", "wandb"), ("MLflow", "mlflow"), ("Trackio", "trackio")):
        if importlib.util.find_spec(package) is not None:
            yield getattr(sinks, kind)()
