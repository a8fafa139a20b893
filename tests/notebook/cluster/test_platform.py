"""Test which platforms nbkit supports, and the errors on all others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from clusters import home_of_clusters
from training_cell import NETWORK

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.launch.platform_check import check_platform, release, starts_by_forking, torch_version

RIGHT = {"system": "linux", "python": (3, 11, 7), "torch": "2.13.0+cpu"}


def test_this_machine_is_supported() -> None:
    check_platform()
    assert release(torch_version()) >= (2, 11)


@pytest.mark.parametrize(
    "change",
    [{}, {"system": "darwin"}, {"python": (3, 14, 0)}, {"torch": "2.11.0"}, {"torch": "2.14.0a0+git1f2e3d4"}],
)
def test_linux_and_macos_with_new_enough_python_and_torch_are_supported(change: dict) -> None:
    check_platform(**{**RIGHT, **change})


@pytest.mark.parametrize(
    ("change", "number", "hint"),
    [
        ({"system": "win32"}, "this is win32", "wsl --install"),
        ({"python": (3, 10, 4)}, "Python 3.10.4, needed >= 3.11", "-m venv"),
        ({"torch": "2.9.1+cu128"}, "torch 2.9.1+cu128, needed >= 2.11", "pip install --upgrade"),
        ({"torch": ""}, "torch >= 2.11 is needed", "pip install torch"),
    ],
    ids=["windows", "old-python", "old-torch", "no-torch"],
)
def test_an_unsupported_platform_is_refused_with_numbers_and_what_to_type(change: dict, number: str, hint: str) -> None:
    with pytest.raises(ClusterError) as error:
        check_platform(**{**RIGHT, **change})

    assert number in error.value.numbers
    assert hint in error.value.hint


def test_ranks_are_forked_on_linux_but_not_on_macos() -> None:
    assert starts_by_forking("linux")
    assert not starts_by_forking("darwin")


@pytest.mark.parametrize(("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("2.14.0a0+git", (2, 14, 0)), ("", ())])
def test_a_version_is_read_up_to_its_last_number(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


LIKE_MACOS = Path(__file__).resolve().parents[2] / "support" / "like_macos"
ON_A_MAC = """
import os, sys, time
import nbkit
from nbkit.notebook.cluster.launch.platform_check import starts_by_forking
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.launch import launch

launch.START_SECONDS = 900  # each rank imports torch by itself
assert not starts_by_forking() and not hasattr(os, "sched_getaffinity")
cluster = nbkit.Cluster.start(2, name="mac", ttl=120)
assert cluster.run("x = torch.ones(1) * rank; dist.all_reduce(x); x.item()").values == {0: 1.0, 1: 1.0}
cluster.push({"data": b"x" * 5_000_000})
assert len(cluster.pull("data", 1)) == 5_000_000
cluster.run(sys.argv[1] + "trainer = make(loading=nbkit.Loading(workers=1), log_dir='runs')")
handle = cluster.run("trainer.fit(100_000)", detach=True)
assert cluster.switch("zero1").strategy == "dp=2 zero=1"
killed = cluster.entry.ranks[1].pid
os.kill(killed, 9)
while cluster.entry.ranks[1].pid == killed:  # another process takes its place
    assert handle.status == "running", handle.wait()
    time.sleep(0.2)
handle.stop(30)
handle = cluster.run("import time\\nif rank == 1: time.sleep(600)\\ndist.barrier()", detach=True)
while not (why := cluster.why()).verdict.stuck:
    time.sleep(0.2)
assert "rank 1 is in time.sleep" in why.sentence, why.sentence
handle.stop(30)
assert cluster.run("trainer.step > 0").values == {0: True, 1: True}
assert [row.state for row in cluster.status().rows] == ["idle", "idle"]
entry = cluster.entry
cluster.stop()
assert entry.left() == [] and registry.entries() == []
print("all of it")
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_cluster_works_without_proc_fork_and_shared_memory(tmp_path: Path) -> None:
    """Hide these with tests/support/like_macos. The libraries, launchd and gloo of a real Mac are not tested."""
    folder = "var-folders-zz-zyxvpxvq6csfxvn-n0000000000000-"  # as long as on a Mac, because it is part of socket paths
    with home_of_clusters(tmp_path / "home"), tempfile.TemporaryDirectory(prefix=folder) as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        environment["PYTHONPATH"] = os.pathsep.join([str(LIKE_MACOS), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", ON_A_MAC, NETWORK], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
    assert done.stdout.endswith("all of it\n"), done.stdout + done.stderr
