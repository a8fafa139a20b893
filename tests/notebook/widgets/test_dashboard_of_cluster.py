"""The dashboard of a real cluster: it finds the newest training by itself, also where the ranks' disk is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.commands import main
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.widgets.dashboard import Dashboard
from nbkit.notebook.widgets.feed import Feed
from nbkit.notebook.widgets.source import ClusterRun

TRAIN = """
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(6, 3), loss=torch.nn.functional.cross_entropy, progress=False, batch_size=8,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=[(torch.randn(6), torch.tensor(i % 3)) for i in range(32)],
)
trainer.fit(12)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "clusters"))
    made = Cluster.start(2, name="watched", cpu=True, ttl=60)
    yield made
    made.stop()


def test_the_newest_training_is_found_read_and_brought_over(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    board, brought = Dashboard(cluster), ClusterRun(cluster, mirror=True)
    try:
        assert "nothing is recorded yet" in repr(board) and brought() is None

        cluster.run(TRAIN)
        here, copy = ClusterRun(cluster)(), brought()
        assert here is not None and copy is not None and copy != here
        assert "step 12" in repr(board)
        assert Feed(copy).snapshot()["points"] == Feed(here).snapshot()["points"]

        cluster.run("trainer.fit(3)")
        brought()
        assert len(Feed(copy).snapshot()["points"]) == 15
        for file in (here / "telemetry").glob("rank?.jsonl"):
            assert file.read_bytes() == (copy / "telemetry" / file.name).read_bytes()

        capsys.readouterr()
        assert main(["watch", "watched", "--once"]) == 0
        assert "step 15" in capsys.readouterr().out
    finally:
        board.close()
