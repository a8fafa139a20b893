"""Test `why` on real ranks, with a hang for each way to inspect a rank. `make why` has all hangs."""

from __future__ import annotations

import time

import pytest
from planted_hangs import HANGS, ask, begin

from nbkit import Cluster, commands
from nbkit.notebook.cluster import why
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.why import looks_from_outside

SAMPLE = (
    pytest.param("a rank keeps the interpreter to itself", marks=pytest.mark.long),
    "another operation",
    "one iteration less, in torch's DDP",
    "a group that one rank does not make",
)
SLEEP = "import time\nif rank == 1:\n    time.sleep(1000)\ndist.barrier()"


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_hang_is_explained(four: Cluster, name: str) -> None:
    answer = ask(four, next(hang for hang in HANGS if hang.name == name), begin(four))

    assert answer.wrong == "", answer.why.sentence  # `make why` also checks how soon it comes


def test_a_rank_that_answers_inspects_another_rank_of_its_host(four: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterEntry, "is_spread", property(lambda entry: True))
    looks = looks_from_outside(four.entry, four.connection.client, [1], [0])

    assert list(looks) == [1] and not looks[1].stopped
    assert looks[1].stack[-1].function in ("_run_module_as_main", "<module>")  # the parent may have been forked


def test_a_hang_is_reported_without_a_request_and_explained_in_a_terminal(
    four: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("QUIET_SECONDS", 1.0), ("_LOOK_SECONDS", 0.5), ("_ANSWER_SECONDS", 0.4)):
        monkeypatch.setattr(why, name, seconds)
    handle = four.run(SLEEP, detach=True)
    try:
        shown, deadline = "", time.monotonic() + 40
        while "Nothing has moved" not in shown and time.monotonic() < deadline:
            time.sleep(0.2)
            shown += capsys.readouterr().err
        assert "Ranks 0,2-3 wait in barrier #1 on world" in shown
        assert "rank 1 is in time.sleep, cell" in shown and "%nbkit why" in shown

        assert commands.main(["why", "four", "--stacks"]) == 0
        told = capsys.readouterr().out
        assert told.startswith("Ranks 0,2-3 wait in barrier #1 on world")
        assert "rank 1, thread MainThread" in told and "time.sleep(1000)" in told
    finally:
        handle.stop()
