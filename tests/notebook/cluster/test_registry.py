"""Test the registry with entries of another release."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from nbkit.commands import main
from nbkit.errors import ClusterError, ClusterNotFound
from nbkit.notebook.cluster import cluster, registry
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.progress import StartProgress
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.wire.processes import Process


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))
    return tmp_path


def saved(name: str, **changed: object) -> ClusterEntry:
    """Save an entry of this process. `changed` fields of its file are replaced, or left out if None."""
    here = Process.of(os.getpid())
    made = (here, here, here, ("core 0",), ("CPU",), {"n": 1}, (here,))
    entry = ClusterEntry(name, "elsewhere", 1, "gloo", 7200.0, 0.0, *made)
    entry.folder.mkdir()
    registry.save(entry)
    path = entry.folder / "cluster.json"
    fields = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return entry


def test_an_entry_is_read_as_written_without_fields_of_another_release() -> None:
    plain, more = saved("plain"), saved("more", colour="blue", spare_hosts=["node3"])

    assert registry.find("none") is None
    assert registry.find("plain") == plain
    assert registry.find("more") == more


def test_the_progress_of_a_start_by_another_release_is_read_too(tmp_path: Path) -> None:
    written = StartProgress("forked", labels=("node1: core 0",), backend="gloo")
    (tmp_path / "progress.json").write_text(json.dumps({**asdict(written), "spare_hosts": ["node3"]}))
    assert progress.read(tmp_path) == written


def test_a_notebook_without_a_cluster_is_told_which_one_it_can_attach_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_current", None)
    with pytest.raises(ClusterError) as alone:
        cluster.current()
    saved("busy", host=socket.gethostname())  # its notebook is this process
    saved("mine")
    with pytest.raises(ClusterError) as beside:
        cluster.current()

    assert alone.value.hint == "%cluster start -n 2"
    assert beside.value.hint == "%cluster attach mine   or   %cluster start -n 2"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": 2}, "format 2; this release reads 1"),
        ({"format": None}, "format none"),
        ({"n": None}, "not whole"),
        ({"protocol": "another"}, "protocol another; this release has"),
        ({"protocol": None}, "protocol none"),
    ],
)
def test_an_entry_of_another_format_is_refused_by_name_and_others_work(
    changed: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("mine")
    saved("theirs", **changed)

    assert [entry.name for entry in registry.entries()] == ["mine"]
    with pytest.raises(ClusterError, match=says) as error:
        registry.find("theirs")
    assert "'theirs'" in error.value.what and "nbkit stop theirs" in error.value.hint
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "mine" in listed and says in listed
    assert says in repr(Cluster.list())
    assert main(["stop", "theirs"]) == 1
    assert says in capsys.readouterr().err
    with pytest.raises(ClusterNotFound):
        registry.running("nobody")
    # Other tests on this machine may leave values in its shared memory.
    assert [line for line in registry.clean() if not line.startswith("values")] == []
