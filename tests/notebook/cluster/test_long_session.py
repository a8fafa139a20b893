"""Test that records of cells, calls and lines stay bounded in the notebook, the controller and the ranks."""

from __future__ import annotations

import time
import tracemalloc
from concurrent.futures import wait

import pytest
import zmq
from ipyparallel.controller.heartmonitor import HeartMonitor
from ipyparallel.controller.hub import Hub
from jupyter_client.session import Session
from tornado import ioloop
from traitlets.config import PyFileConfigLoader
from zmq.eventloop.zmqstream import ZMQStream

from nbkit import Cluster
from nbkit.notebook.cluster.launch import controller
from nbkit.notebook.cluster.output.display import KEPT_CHARACTERS, KeptText
from nbkit.wire.cells import SIGNATURES_KEPT

SIGNATURES = "len(get_ipython().kernel.session.digest_history)"
SHOWN = "get_ipython().history_manager.outputs"


@pytest.mark.long
def test_signatures_of_answered_calls_are_forgotten(two: Cluster) -> None:
    client = two.connection.client
    per_rank = SIGNATURES_KEPT + 100
    for _ in range(per_rank // 100):
        calls = [call for _ in range(100) for call in client.call([0, 1], "nbkit.bridge.calls:hello").values()]
        assert not wait(calls, 60).not_done
        assert not any(call.exception() for call in calls)
    assert 0 < len(client.ipp.session.digest_history) <= SIGNATURES_KEPT
    assert all(0 < kept <= SIGNATURES_KEPT for kept in two.run(SIGNATURES).values.values())


def test_the_hub_keeps_no_records_of_calls(two: Cluster) -> None:
    client = two.connection.client
    call, _ = client.call([0, 1], "nbkit.bridge.calls:hello").values()
    call.result(60)
    known = client.ipp.queue_status()
    assert known.pop("unassigned") == 0
    assert set(known) == {0, 1}, "the hub still hears which engines there are"
    assert all(status == {"queue": 0, "completed": 0, "tasks": 0} for status in known.values()), known


def test_the_controller_keeps_a_bounded_number_of_signatures(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for patched, name in ((Hub, "__init__"), (HeartMonitor, "beat")):  # the config file patches them in its reader
        monkeypatch.setattr(patched, name, getattr(patched, name))
    config = PyFileConfigLoader("ipcontroller_config.py", str(two.connection.entry.folder / "profile")).load_config()
    controllers, sender = Session(config=config), Session(key=config.Session.key)
    for _ in range(SIGNATURES_KEPT + 100):
        controllers.deserialize(sender.serialize(sender.msg("status"))[1:])
    assert 0 < len(controllers.digest_history) <= SIGNATURES_KEPT


@pytest.mark.parametrize(("engines", "milliseconds"), [(2, 1000), (1024, 2048)])
def test_the_period_of_heartbeats_grows_with_the_number_of_engines(
    engines: int, milliseconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The controller takes 0.07 ms for an answer. An answer that is two periods late does not count.
    monkeypatch.setattr(HeartMonitor, "beat", HeartMonitor.beat)
    controller.slow_down()
    context = zmq.Context()
    try:
        streams = [ZMQStream(context.socket(kind), ioloop.IOLoop()) for kind in (zmq.PUB, zmq.ROUTER)]
        monitor = HeartMonitor(ping_stream=streams[0], pong_stream=streams[1], loop=streams[0].io_loop)
        monitor.hearts = {str(number).encode() for number in range(engines)}
        monitor.caller = ioloop.PeriodicCallback(monitor.beat, controller.FAST_MS)
        monitor.last_arrival, monitor.tic = 0.0, time.monotonic() - 2 * controller.QUIET_SECONDS
        monitor.beat()
        assert monitor.caller.callback_time == milliseconds
        assert monitor.max_heartmonitor_misses * milliseconds == pytest.approx(300_000, rel=0.01)
    finally:
        context.destroy(linger=0)


def test_ranks_keep_no_outputs_of_cells(two: Cluster) -> None:
    two.run("'a value'")
    two.run("display('a display')")
    kept = two.run(f"sum(map(len, {SHOWN}.values())) if hasattr(get_ipython().history_manager, 'outputs') else 0")
    assert kept.values == {0: 0, 1: 0}


def test_the_text_of_a_cell_needs_no_object_for_each_print() -> None:
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


def test_the_text_of_a_cell_is_kept_up_to_its_limit() -> None:
    text = KeptText()
    text.add("first ")
    for _ in range(3):
        text.add("x" * (KEPT_CHARACTERS // 2))
    assert len(str(text)) == KEPT_CHARACTERS and str(text).startswith("first x")
