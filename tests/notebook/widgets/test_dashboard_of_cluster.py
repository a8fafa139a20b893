"""Test that the dashboard of a real cluster finds the newest training, even if the ranks use another disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_parents import forked_parents

from nbkit.commands import main
from nbkit.errors import CellError
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.newest_run import NewestRun
from nbkit.notebook.run.reader import RunReader
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.records.record_file import old_part

TRAIN = """
torch.manual_seed(0)
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(6, 3), loss=torch.nn.functional.cross_entropy, progress=False, batch_size=8,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=[(torch.randn(6), torch.tensor(i % 3)) for i in range(32)], recovery=nbkit.Recovery(on_failure="stop"),
)
trainer.fit(12)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "clusters"))
    with forked_parents():
        made = Cluster.start(2, name="watched", cpu=True, ttl=60)
    yield made
    made.stop()


def test_the_newest_training_is_found_read_and_copied(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    board, brought = Dashboard(cluster), NewestRun(cluster.connection, mirror=True)
    try:
        assert "nothing is recorded yet" in repr(board) and brought() is None

        cluster.run(TRAIN)
        here, copy = NewestRun(cluster.connection)(), brought()
        assert here is not None and copy is not None and copy != here
        assert "step 12" in repr(board)
        assert RunReader(copy).snapshot()["points"] == RunReader(here).snapshot()["points"]

        cluster.run("trainer.fit(3)")
        for _ in range(100):  # a thread writes the records
            brought()
            if len(RunReader(copy).snapshot()["points"]) == 15:
                break
            time.sleep(0.1)
        assert len(RunReader(copy).snapshot()["points"]) == 15
        for file in (here / "telemetry").glob("rank?.jsonl"):
            assert file.read_bytes() == (copy / "telemetry" / file.name).read_bytes()

        # Between two parts, the file is missing for a moment.
        (file,) = (here / "telemetry").glob("rank1.jsonl")
        away = file.rename(file.with_suffix(".new"))
        assert brought() == copy
        away.rename(file)
        assert brought() == copy and len(RunReader(copy).snapshot()["points"]) == 15

        # The last lines of a part are copied even if the next part has begun.
        head, *_, last = file.read_text().splitlines(keepends=True)
        with file.open("a") as more:
            more.write(last)
        file.rename(old_part(file))
        assert '"part":' in head
        file.write_text(head.replace('"part":', '"part":1'))
        brought()
        for each in (file, old_part(file)):
            assert each.read_bytes() == (copy / "telemetry" / each.name).read_bytes()

        capsys.readouterr()
        assert main(["watch", "watched", "--once"]) == 0
        assert "step 15" in capsys.readouterr().out
    finally:
        board.close()


@pytest.mark.parametrize(
    ("how", "error", "what"),
    [("raise ValueError('odd sample')", "ValueError", "odd sample"), ("os.kill(os.getpid(), 9)", "", "rank 1 died")],
)
def test_a_rank_that_fails_or_dies_is_named_once(cluster: Any, how: str, error: str, what: str) -> None:
    cluster.run(TRAIN)
    folder = NewestRun(cluster.connection)()
    assert folder is not None
    reader = RunReader(folder)
    assert [event["kind"] for event in reader.snapshot()["events"]] == ["run_started", "run_stopped"]

    with pytest.raises(CellError):
        cluster.run(
            f"import os\ndef fail(trainer, record):\n    if record['step'] == 15 and rank == 1: {how}\n"
            "trainer._callbacks += (fail,)\ntrainer.fit(8)"
        )
    found = [event for event in reader.snapshot()["events"] if event["kind"] == "failure"]
    assert [(event["rank"], event["error"], event["what"]) for event in found] == [(1, error, what)]
    assert found[0]["step"] in (15, 16)
    said = plain(lines_of(reader.snapshot()))
    assert f"✕ failure after step {found[0]['step']}: rank 1" in said and what in said
