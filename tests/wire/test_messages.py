"""Test the messages between processes of a cluster: each has a handler, and arrives unchanged."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, is_dataclass
from threading import Barrier

import pytest

from nbkit.bridge.engine import RankEngine
from nbkit.bridge.parent.other_hosts import OtherHosts
from nbkit.bridge.parent.parent import Parent
from nbkit.bridge.parent.replacement import Replacer
from nbkit.bridge.requests import Requests
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.hosts.agent import JoinedAgent
from nbkit.notebook.cluster.hosts.coordinator import Coordinator
from nbkit.wire import messages
from nbkit.wire.cells import CellRequest, first_line
from nbkit.wire.messages import (
    Death,
    EndTraining,
    FitEntered,
    FitLeft,
    ForAgent,
    ForCoordinator,
    ForHost,
    ForNotebook,
    ForParent,
    ForRank,
    GivenUp,
    HostJoined,
    Message,
    ProtocolError,
    RankIsDead,
    RankSaid,
    ReadyToForm,
    Request,
    RunLiveCell,
    TellRank,
    TrainingGoesOn,
    WaitsForOthers,
    WantedSize,
    decoded,
    deliver,
    encoded,
    handlers_of,
    handles,
    is_sent,
)
from nbkit.wire.processes import Process

MESSAGES = [kind for kind in vars(messages).values() if isinstance(kind, type) and is_sent(kind)]
RECEIVERS: dict[type[Message], type] = {
    Request: Requests,
    ForNotebook: Connection,
    ForParent: Parent,
    ForRank: RankEngine,
    ForAgent: JoinedAgent,
    ForCoordinator: Coordinator,
}


@pytest.mark.parametrize("audience", RECEIVERS, ids=lambda kind: kind.__name__)
def test_each_message_has_a_handler_in_the_process_that_receives_it(audience: type[Message]) -> None:
    sent = {kind for kind in MESSAGES if issubclass(kind, audience)}

    assert sent
    assert sent - set(handlers_of(RECEIVERS[audience])) <= {messages.Hello}  # the client handles it itself


def test_each_message_for_the_parent_of_a_host_has_exactly_one_handler() -> None:
    sent = {kind for kind in MESSAGES if issubclass(kind, ForHost)}
    own, of_other_hosts = set(handlers_of(Parent)), set(handlers_of(OtherHosts))

    assert sent <= own | of_other_hosts
    assert own & of_other_hosts == set()


def test_the_replacer_handles_the_messages_of_ranks_about_a_training() -> None:
    about_training = {FitEntered, FitLeft, ReadyToForm, TrainingGoesOn, WaitsForOthers}

    assert set(handlers_of(Replacer)) == about_training


@pytest.mark.parametrize(
    "message",
    [
        FitLeft("it failed"),
        TellRank(1, GivenUp("too late")),
        RankSaid(1, 77, FitEntered("cell", 2)),
        HostJoined(0, "a", "", 0.1, {"torch": "2"}, "cpu", "gloo", ("core 0",), ("CPU",), (), (), ("10.0.0.1",)),
        RunLiveCell(3, CellRequest("a", "x = 1", 4, (0, 2))),
        RankIsDead(Death(1, "SIGKILL", 2.5, pid=7, cells=("a", "b"), failed="")),
        RankIsDead(Death(1, "its host does not answer", 2.5)),
        ReadyToForm(2, 9, "10.0.0.1", 4000, Process(7, 1.0, "boot"), WantedSize(2, ({"cores": [1]},), "cell")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_equal_after_encoding_and_decoding(message: Message) -> None:
    assert decoded(json.loads(json.dumps(encoded(message)))) == message


def test_the_first_instance_of_a_message_is_a_frozen_dataclass() -> None:
    class Fresh(Request):
        number: int = 0

    assert not is_dataclass(Fresh)
    before, together = sys.getswitchinterval(), Barrier(8)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda number: (together.wait(), Fresh(number))[1], range(8)))
    finally:
        sys.setswitchinterval(before)
    assert made == [Fresh(number) for number in range(8)] and Fresh() == Fresh(0)
    assert {message: str(message) for message in made}[Fresh(2)].endswith("Fresh(number=2)")
    with pytest.raises(FrozenInstanceError):
        made[0].number = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Fresh(1, 2)  # type: ignore[call-arg]


def test_a_message_of_another_release_is_refused_with_both_versions() -> None:
    sent = {**encoded(EndTraining("")), "_protocol": "another"}

    with pytest.raises(ProtocolError) as refused:
        decoded(sent)
    assert refused.value.numbers == f"its messages are of protocol another; this release reads {messages.protocol()}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"_message": "Unheard"}, "There is no message 'Unheard'."),
        ({"_message": "Process"}, "There is no message 'Process'."),
        ({"more": 1}, "A EndTraining has other fields."),
        ({"why": None, "_message": "FitEntered"}, "A FitEntered has other fields."),
    ],
)
def test_an_unknown_name_or_field_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        decoded({**encoded(EndTraining("")), **change})
    assert refused.value.what == said


def test_a_message_without_a_handler_is_written_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    class Listener:
        @handles(FitLeft)
        def _on_left(self, left: FitLeft, where: str) -> str:
            return f"{left.why} {where}"

    assert deliver(FitLeft("stopped"), Listener(), "here") == "stopped here"
    assert deliver(EndTraining("why"), Listener(), "here") is None
    assert "Listener does not handle EndTraining(why='why')" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("\n# %%distributed\ntrainer.fit(2000)      # the prompt comes back\n", "trainer.fit(2000)"),
        ("# a comment alone", "# a comment alone"),
        ("print('#1')", "print('#1')"),
        ("x" * 50, "x" * 39 + "…"),
    ],
)
def test_a_cell_is_named_by_its_first_line_without_the_comment_behind_it(source: str, shown: str) -> None:
    assert first_line(source) == shown
