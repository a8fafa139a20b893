"""Test `hang_timeout=`: a rank that all others wait for is ended and replaced; if all ranks wait, none is ended.

All tests share a cluster of three. Each compares with an undisturbed training.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cell import NETWORK, cluster_of

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.wire.messages import GetStatus

STEPS = 14
TIMEOUT = 6.0
SETUP = f"""{NETWORK}
import os
steps = {STEPS}

def hangs(trainer, record):
    if rank == 1 and record["step"] == at.get("step"):
        at["how"]()

def asleep():
    if os.getpid() == at["pid"]:  # a rank that has taken its place goes on
        time.sleep(10_000)

def alone_in_a_collective():
    if rank == 1:
        dist.barrier()

at = {{}}
patient = nbkit.Recovery(backup_every=1, hang_timeout={TIMEOUT})
defaults = dict(data=rows()[:60], batch_size=12, callbacks=[pace, hangs], recovery=patient)
"""
CELL = "history = trainer.fit(steps)\n[record['loss'] for record in history]"


@pytest.fixture(scope="module")
def three(nbkit_home: Path) -> Iterator[Cluster]:
    yield from cluster_of(3, "hung", SETUP)


@pytest.fixture(scope="module")
def alone(three: Cluster) -> list[float]:
    losses: list[float] = three.run(f"trainer = make()\n{CELL}").values[0]
    assert len(losses) == STEPS
    return losses


def step_of(cluster: Cluster) -> int:
    told = cluster.connection.client.ask([0], GetStatus()).get(0, {})
    return int(told["progress"].get("step", 0)) if told.get("training") else -1


def pids(cluster: Cluster) -> list[int]:
    return [process.pid for process in cluster.entry.ranks]


def test_a_rank_that_sleeps_is_ended_and_replaced(
    three: Cluster, alone: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    before = pids(three)
    three.run(f"at.update(step=6, how=asleep, pid={before[1]}); trainer = make(strategy='zero3')")
    results = three.run(CELL, timeout=120)
    for rank in range(3):
        assert results.values[rank] == pytest.approx(alone, abs=1e-10)
    assert "Rank 1 died (it hung, and was ended after" in capsys.readouterr().err
    assert [old == new for old, new in zip(before, pids(three), strict=True)] == [True, False, True]


@pytest.mark.long
def test_a_rank_that_the_system_has_stopped_is_ended_and_replaced(three: Cluster, alone: list[float]) -> None:
    three.run("at.clear(); trainer = make()")
    before = pids(three)

    def stop() -> None:
        while step_of(three) < 4:
            time.sleep(0.02)
        os.kill(before[2], signal.SIGSTOP)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    results = three.run(CELL, timeout=120)
    thread.join()
    for rank in range(3):
        assert results.values[rank] == pytest.approx(alone, abs=1e-10)
    assert [old == new for old, new in zip(before, pids(three), strict=True)] == [True, True, False]


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("alone_in_a_collective", marks=pytest.mark.long), "breakpoint"])
def test_no_rank_is_ended_if_all_ranks_wait(three: Cluster, how: str) -> None:
    """Let rank 1 wait at a breakpoint, or in another collective than the ranks that wait in a step."""
    before = pids(three)
    three.run(f"at.update(step=4, how={how}); trainer = make()")
    handle = three.run(CELL, detach=True)
    while step_of(three) < 4 or (how != "breakpoint" and not three.why().verdict.stuck):
        time.sleep(1.0)  # waiting costs less compute than asking
    time.sleep(1.5 * TIMEOUT)
    assert pids(three) == before and all(process.is_alive() for process in three.entry.ranks)
    handle.stop()
    handle.wait(timeout=60)
    assert pids(three) == before


def test_a_hang_timeout_of_zero_is_refused(three: Cluster) -> None:
    with pytest.raises(CellError) as refused:
        three.run("make(recovery=nbkit.Recovery(hang_timeout=0))")
    assert "nbkit.Recovery(hang_timeout=60)" in refused.value.traceback
