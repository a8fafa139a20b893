"""Test that another user of the host can neither read nor control files, output of cells, processes or ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import stranger
from clusters import home_of_clusters

from nbkit import Cluster

SECRET = "the word that only we may read"
TRAINING = """
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, batch_size=4, progress=False,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    data=[(torch.ones(4), torch.ones(1))] * 16)
trainer.fit(2)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """Yield a folder that everybody may enter, so that only nbkit protects its contents."""
    folder = Path(tempfile.mkdtemp(prefix="nbkit-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def victim(open_folder: Path) -> Iterator[Cluster]:
    before = os.getcwd()
    os.chdir(open_folder)
    with home_of_clusters(open_folder / "home"):
        (open_folder / "home").mkdir(mode=0o755)
        cluster = Cluster.start(n=2, name="ours", cpu=True)
        cluster.run(TRAINING)
        yield cluster
        cluster.stop()
    os.chdir(before)


def processes_of(cluster: Cluster) -> list[int]:
    entry = cluster.entry
    roots = [psutil.Process(entry.parent.pid), psutil.Process(entry.controller.pid)]
    return [each.pid for root in roots for each in (root, *root.children(recursive=True))]


def try_all(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return what the other user could get while a cell prints the secret."""
    mark = folder / "open" / "mark"
    mark.parent.mkdir(mode=0o777)
    mark.parent.chmod(0o777)
    words = [sys.executable, stranger.__file__, str(folder), SECRET, str(mark), *map(str, processes_of(cluster))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "listening" in process.stderr.readline()
        while process.poll() is None:
            cluster.run(f"print({SECRET!r}); import time; time.sleep(0.2)")
        assert process.stdout is not None
        got = json.loads(process.stdout.read())
    return {**got, "ran": mark.exists()}


@pytest.mark.long
def test_another_user_can_read_and_control_nothing(victim: Cluster, open_folder: Path) -> None:
    runs = next((open_folder / "runs").iterdir())
    assert any(runs.rglob("*.jsonl"))
    got = try_all(victim, open_folder)
    ours = [path for path in got["files"] if path.startswith((str(open_folder / "home/ours"), str(runs)))]
    assert ours == [] and got["processes"] == [] and got["signals"] == []
    assert got["heard"] == [] and not got["ran"]
    assert victim.run("rank").values == {0: 0, 1: 1}
