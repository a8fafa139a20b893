"""Records that grow with every cell, call or line are bounded, in the notebook, the controller and the ranks."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import wait

import pytest
from ipyparallel.controller.heartmonitor import HeartMonitor
from ipyparallel.controller.hub import Hub
from jupyter_client.session import Session
from traitlets.config import PyFileConfigLoader

from nbkit import Cluster
from nbkit.notebook.cluster.launch.hub_records import CALLS_KEPT
from nbkit.notebook.cluster.output.kept_text import KEPT_CHARACTERS, KeptText
from nbkit.wire.cells import SIGNATURES_KEPT

SIGNATURES = "len(get_ipython().kernel.session.digest_history)"
SHOWN = "get_ipython().history_manager.outputs"


@pytest.mark.long
def test_answered_calls_and_signatures_are_forgotten(two: Cluster) -> None:
    client = two.connection.client
    per_rank = SIGNATURES_KEPT + 100
    for _ in range(per_rank // 100):
        calls = [call for _ in range(100) for call in client.call([0, 1], "nbkit.bridge.calls:hello").values()]
        assert not wait(calls, 60).not_done
        assert not any(call.exception() for call in calls)
    assert 0 < len(client.ipp.session.digest_history) <= SIGNATURES_KEPT
    assert all(0 < kept <= SIGNATURES_KEPT for kept in two.run(SIGNATURES).values.values())
    completed = [status["completed"] for rank, status in client.ipp.queue_status().items() if rank != "unassigned"]
    assert len(completed) == 2 and sum(completed) < CALLS_KEPT


def test_the_controller_remembers_as_many_signatures(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for patched, name in ((Hub, "save_queue_result"), (HeartMonitor, "beat")):  # the file patches them in its reader
        monkeypatch.setattr(patched, name, getattr(patched, name))
    config = PyFileConfigLoader("ipcontroller_config.py", str(two.connection.entry.folder / "profile")).load_config()
    controllers, sender = Session(config=config), Session(key=config.Session.key)
    for _ in range(SIGNATURES_KEPT + 100):
        controllers.deserialize(sender.serialize(sender.msg("status"))[1:])
    assert 0 < len(controllers.digest_history) <= SIGNATURES_KEPT


def test_ranks_forget_what_cells_have_shown(two: Cluster) -> None:
    two.run("'a value'")
    two.run("display('a display')")
    kept = two.run(f"sum(map(len, {SHOWN}.values())) if hasattr(get_ipython().history_manager, 'outputs') else 0")
    assert kept.values == {0: 0, 1: 0}


def test_text_of_a_cell_takes_no_object_for_each_print() -> None:
    text = KeptText()
    tracemalloc.start()
    try:
        for i in range(100_000):
            text.add(f"{i % 100:02}")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(text) == "".join(f"{i:02}" for i in range(100)) * 1000
    assert taken < 600_000  # a string for each would take 6 MB


def test_text_of_a_cell_is_kept_up_to_its_limit() -> None:
    text = KeptText()
    text.add("first ")
    for _ in range(3):
        text.add("x" * (KEPT_CHARACTERS // 2))
    assert len(str(text)) == KEPT_CHARACTERS and str(text).startswith("first x")
