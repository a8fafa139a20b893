"""A rank dies where no cell tells the others: while a world is formed, or just before a cell begins."""

from __future__ import annotations

import os
import signal

import pytest

from nbkit import Cluster
from nbkit.wire.cells import CellRecord, CellRequest

REFORM = "nbkit.bridge.calls:reform"


def test_a_rank_that_dies_keeps_nobody_waiting_for_it(nbkit_home: object) -> None:
    cluster = Cluster.start(2, cpu=True, name="widowed", ttl=600)
    try:
        wire = cluster.connection.client
        _, port = wire.call_and_wait([0], "nbkit.bridge.calls:open_store")[0]
        forming = wire.call([0], REFORM, 2, "127.0.0.1", port)[0]
        with pytest.raises(TimeoutError):
            forming.result(timeout=0.5)  # it waits for rank 1, which was not asked
        os.kill(cluster.entry.ranks[1].pid, signal.SIGKILL)
        # ipyparallel hands the error over as the result. The forming itself gives up after 60 s.
        assert "rank 1 died" in str(forming.result(timeout=30))

        # The notebook would refuse this cell; it stands for one that was on its way when the rank died.
        request = CellRequest("under-way", "import time; time.sleep(60)", 1, (0, 1))
        record = wire.call([0], "nbkit.bridge.calls:run_cell", request)[0].result(timeout=20)
        assert isinstance(record, CellRecord)
        assert record.status == "released"

        assert "Rank 1 has died" in str(wire.call([0], REFORM, 3, "127.0.0.1", port)[0].result(timeout=20))
    finally:
        cluster.stop()
