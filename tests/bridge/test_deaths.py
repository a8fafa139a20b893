"""Test the death of a rank outside of a cell: while a world is formed, or just before a cell begins."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nbkit import Cluster
from nbkit.errors import RankDied
from nbkit.wire.cells import CellRecord, CellRequest

REFORM = "nbkit.bridge.calls:reform"


def test_no_rank_waits_for_a_rank_that_has_died(nbkit_home: object) -> None:
    cluster = Cluster.start(2, cpu=True, name="widowed", ttl=600)
    try:
        wire = cluster.connection.client
        _, port = wire.call_and_wait([0], "nbkit.bridge.calls:open_store")[0]
        forming = wire.call([0], REFORM, 2, "127.0.0.1", port)[0]
        with pytest.raises(TimeoutError):
            forming.result(timeout=0.5)  # it waits for rank 1, which got no request
        os.kill(cluster.entry.ranks[1].pid, signal.SIGKILL)
        # ipyparallel returns the error as the result. Otherwise the forming would end after 60 s.
        assert "rank 1 died" in str(forming.result(timeout=30))

        # The notebook would refuse this cell. It represents one that was sent before the rank died.
        request = CellRequest("under-way", "import time; time.sleep(60)", 1, (0, 1))
        record = wire.call([0], "nbkit.bridge.calls:run_cell", request)[0].result(timeout=20)
        assert isinstance(record, CellRecord)
        assert record.status == "released"

        assert "Rank 1 has died" in str(wire.call([0], REFORM, 3, "127.0.0.1", port)[0].result(timeout=20))
    finally:
        cluster.stop()


TRAINED = """
import torch
data = [(torch.ones(4), torch.ones(2))] * 8
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.functional.mse_loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=data, batch_size=8, log_dir=None, progress=False)
trainer.fit(2)
trainer.save(PATH)
"""


def test_the_death_of_a_rank_outside_of_fit_names_the_newest_checkpoint(nbkit_home: object, tmp_path: Path) -> None:
    cluster = Cluster.start(2, cpu=True, name="between", ttl=600)
    try:
        cluster.run(TRAINED.replace("PATH", repr(str(tmp_path / "it's saved"))))
        with pytest.raises(RankDied) as died:  # in a cell that only loads, compares or saves
            cluster.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrainer.load('x')")
        path = str(tmp_path / "it's saved")
        assert died.value.hint.endswith(f"then build the Trainer again, and trainer.load({path!r})   of step 2")
    finally:
        cluster.stop()
