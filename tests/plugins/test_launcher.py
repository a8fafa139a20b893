"""Test that a launcher of another package, found by its entry point, starts a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clusters import assert_gone, home_of_clusters

from magics.cluster import options_of
from nbkit import Cluster
from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster.hosts.launcher import LauncherRequest
from nbkit.notebook.cluster.hosts.start_options import requested

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nbkit_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_of_clusters(tmp_path_factory.mktemp("clusters")) as home:
        yield home


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the metadata of a package with the entry point, where this process and its children find it."""
    package = tmp_path / "site" / "local_launcher-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: local-launcher\nVersion: 1.0\n")
    launchers = {"local": "tests.plugins.local_launcher:LocalLauncher", "gone": "tests.plugins.gone:Gone"}
    broken = ("WithoutStart", "NotDerived", "WithoutPoll", "WithoutProgram", "Leaves")
    launchers |= {name.lower(): f"tests.plugins.broken_launchers:{name}" for name in broken}
    lines = [f"{name} = {place}" for name, place in launchers.items()]
    (package / "entry_points.txt").write_text("\n".join(["[nbkit.launchers]", *lines]))
    monkeypatch.syspath_prepend(str(package.parent))
    paths = [str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    yield


def asked(words: str) -> LauncherRequest:
    found = requested(options_of(words))
    assert isinstance(found, LauncherRequest)
    return found


@pytest.mark.parametrize("words", [pytest.param("", marks=pytest.mark.long), " -- flaky queue"])
def test_a_launcher_starts_ranks_that_form_a_world_and_ends_them(
    installed: None, nbkit_home: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check also that an error of `poll` or `stop` neither ends the cluster nor leaves processes."""
    cluster = Cluster.start(name="plugged", on=asked(f"start --launcher local -n 2 --cpu{words}"), ttl=60)
    try:
        assert cluster.run("seen = torch.ones(1); dist.all_reduce(seen)\nseen.item()").values == {0: 2.0, 1: 2.0}
        assert ("in the queue" in capsys.readouterr().out) == ("queue" in words)
    finally:
        cluster.stop()
    assert_gone(lambda: [each for each in psutil.process_iter(["cmdline"]) if "plugged" in str(each.info["cmdline"])])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fail", r"The launcher 'local' has ended(.|\n)*code 3(.|\n)*the queue is closed"),
        (
            "raise",
            r"The launcher 'local' raised an error(.|\n)*no machine is free \(.*/plugins/local_launcher.py:\d+\)",
        ),
    ],
)
def test_an_error_of_a_launcher_is_reported_and_leaves_no_ranks(
    installed: None, nbkit_home: Path, words: str, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        Cluster.start(name="plugged", on=asked(f"start --launcher local -n 2 --cpu -- {words}"), ttl=60)
    assert not (nbkit_home / "plugged").exists() or not list((nbkit_home / "plugged").glob("rank*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("start --launcher local", "How many ranks shall local start"),
        ("start --launcher local -n 2 --slurm", "One launcher starts the ranks"),
        ("start --launcher local -n 2 --nodes 3", "at least one rank on each node"),
    ],
)
def test_options_that_do_not_fit_are_refused(installed: None, words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked(words)


def test_an_unknown_launcher_is_refused_with_the_installed_ones(installed: None, nbkit_home: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no launcher 'others'(.|\n)*local"):
        Cluster.start(name="plugged", on=asked("start --launcher others -n 2"), ttl=60)


def test_cluster_start_accepts_a_launcher_by_name(installed: None, nbkit_home: Path) -> None:
    with pytest.raises(ClusterError, match="no machine is free"):
        Cluster.start(2, launcher="local", options=["raise"], cpu=True, name="plugged", ttl=60)
    with pytest.raises(UsageError, match=r"slurm has a request of its own(.|\n)*SlurmRequest"):
        Cluster.start(2, launcher="slurm")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loca", r"There is no launcher 'loca'(.|\n)*--launcher local"),
        ("gone", r"cannot be loaded(.|\n)*No module named 'tests.plugins.gone'(.|\n)*gone = tests.plugins.gone:Gone"),
        ("notderived", r"derives from nbkit.Launcher"),
        ("withoutstart", r"has no method start"),
        ("withoutprogram", r"There is no command 'no-such-program'"),
        ("withoutpoll", r"cannot tell whether its agents run(.|\n)*self.run"),
        ("leaves", r"has ended with code 0(.|\n)*must stay as long as its agent"),
    ],
)
def test_a_mistake_in_a_launcher_is_reported_with_a_remedy(
    installed: None, nbkit_home: Path, name: str, said: str
) -> None:
    with pytest.raises((ClusterError, UsageError), match=said):
        Cluster.start(2, launcher=name, cpu=True, name="plugged", ttl=60)
