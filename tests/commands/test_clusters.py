"""Test `nbkit list`, `stop` and `clean` on real processes that play the part of a cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbkit.commands import main
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.registry import ClusterEntry, Process

Start = Callable[..., ClusterEntry]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a "cluster" of sleeping processes; all of them are gone after the test."""
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def process(code: str, **options: Any) -> Process:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **options))
        return Process.of(started[-1].pid)

    def start(name: str, n: int = 2, born: float = 0.0) -> ClusterEntry:
        # Like real ranks, these end when their parent ends, because their stdin closes.
        reading, writing = os.pipe()
        parent = process("import time; time.sleep(600)", pass_fds=(writing,))
        ranks = tuple(process("import sys; sys.stdin.read()", stdin=reading) for _ in range(n))
        os.close(reading)
        os.close(writing)
        controller = process("import time; time.sleep(600)")
        entry = ClusterEntry(
            name=name,
            host=socket.gethostname(),
            n=n,
            backend="gloo",
            ttl=7200.0,
            born=born or time.time(),
            controller=controller,
            parent=parent,
            kernel=Process.of(os.getpid()),
            labels=tuple(f"core {rank}" for rank in range(n)),
            reasons=("asked for",) * n,
            ranks=ranks,
        )
        entry.folder.mkdir()
        registry.save(entry)
        return entry

    yield start
    for child in started:
        child.kill()
        child.wait()


def processes(entry: ClusterEntry) -> list[Process]:
    return [entry.controller, entry.parent, *entry.ranks]


def test_list_without_a_cluster_says_how_to_start_one(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "%cluster start" in capsys.readouterr().out


def test_list_shows_each_cluster_with_its_ranks_devices_and_age(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("lesson", n=2, born=time.time() - 7300)
    start("other", n=1)

    assert main(["list"]) == 0
    head, lesson, other = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NAME", "RANKS", "BACKEND"]
    assert lesson.split()[:4] == ["lesson", "2", "gloo", "attached"]
    assert "2 h" in lesson
    assert lesson.endswith("core 0, core 1")
    assert other.split()[:2] == ["other", "1"]


def test_list_as_json_has_the_same_clusters_in_numbers(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("lesson", n=2, born=time.time() - 7300)

    assert main(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (lesson,) = told["clusters"]
    assert (lesson["name"], lesson["ranks"], lesson["state"], lesson["ttl"]) == ("lesson", 2, "attached", 7200.0)
    assert 7300 <= lesson["age"] < 7400 and lesson["devices"] == ["core 0", "core 1"]
    assert told["unreadable"] == []


def test_stop_ends_only_the_processes_of_the_named_cluster(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    lesson, other = start("lesson"), start("other")

    assert main(["stop", "lesson"]) == 0
    assert capsys.readouterr().out == "lesson: stopped, 2 ranks ended\n"
    assert not any(process.is_alive() for process in processes(lesson))
    assert all(process.is_alive() for process in processes(other))
    assert [entry.name for entry in registry.entries()] == ["other"]


def test_stopping_an_unknown_cluster_names_the_running_ones(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("lesson")

    assert main(["stop", "lessen"]) == 1
    shown = capsys.readouterr().err
    assert "'lessen'" in shown
    assert "running: lesson" in shown
    assert shown.endswith("→ nbkit list\n")  # a command, not a magic, because this is a terminal


def test_clean_ends_the_processes_of_a_broken_cluster_and_no_others(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, sound = start("broken"), start("sound")
    os.kill(broken.controller.pid, signal.SIGKILL)
    os.waitpid(broken.controller.pid, 0)

    main(["list"])
    assert "ended: nbkit clean" in capsys.readouterr().out
    assert main(["clean"]) == 0
    assert capsys.readouterr().out.startswith("broken: ended")
    assert not any(process.is_alive() for process in processes(broken))
    assert all(process.is_alive() for process in processes(sound))
    main(["clean"])
    assert capsys.readouterr().out == "Nothing to clean.\n"


def test_why_without_a_name_takes_the_only_cluster(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why"]) == 1 and "No cluster is running." in capsys.readouterr().err
    one = start("one")
    assert registry.the_only_one().name == one.name
    start("two")
    assert main(["why"]) == 2
    said = capsys.readouterr().err
    assert "Several clusters are running: say which.\none, two\n→ nbkit why one" in said
