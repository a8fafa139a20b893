"""Test that cluster, running cell and output survive when the kernel dies or is restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kernel_client import Kernel, said

from nbkit.notebook.cluster import registry

TRAINING = """%%distributed --detach
import time
for i in range(60):
    x = torch.ones(1); dist.all_reduce(x)
    print('step', i)
    time.sleep(0.1)
steps = i
"""


def processes_of(home: Path, name: str) -> list[psutil.Process]:
    """Return the controller of a cluster in `home`, the parent of its ranks, and the processes that these started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_HOME", str(home))
        entry = registry.running(name)
    family = [psutil.Process(entry.controller.pid), psutil.Process(entry.parent.pid)]
    return [member for process in family for member in (process, *process.children(recursive=True))]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Yield a kernel that each test kills or restarts. Its cluster must survive, and leave nothing after its stop."""
    home = tmp_path_factory.mktemp("home")
    with Kernel(home) as kernel:
        kernel.run("%load_ext nbkit")
        cell = kernel.run("%cluster start -n 2 --cpu --name long")
        assert cell.status == "ok", cell.text
        family = processes_of(home, "long")
        yield kernel
        kernel.run("%cluster stop")
        assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest.mark.long
@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.long)], ids=["restarted", "killed"])
def test_a_running_cell_survives_its_kernel_and_attach_shows_its_output(kernel: Kernel, kill: bool) -> None:
    kernel.run(TRAINING)
    time.sleep(1)
    kernel.restart(kill=kill)
    kernel.run("%load_ext nbkit")
    message = kernel.send("%cluster attach long")
    cell = kernel.collect(message)
    assert cell.status == "ok", cell.text
    assert "running" in kernel.run("handle.status").text
    waited = kernel.run("%train wait")
    assert waited.status == "ok", waited.text
    text = cell.text + kernel.late(message, 0.5).text
    assert [f"[0-1] step {i}\n" in text or f"[0] step {i}\n" in text for i in range(60)] == [True] * 60
    assert text.count("step 5\n") <= 2
    assert "Out[0-1]: 59" in kernel.run("%%distributed\nsteps").text


@pytest.mark.long
def test_the_result_of_a_cell_that_ended_meanwhile_is_shown_on_attach(kernel: Kernel, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    kernel.run(f"%%distributed --detach\nimport time; time.sleep(2.5); print('made it'); open({str(ended)!r}, 'w'); 42")
    kernel.restart(kill=True)
    deadline = time.monotonic() + 30
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # until the cell ends
    kernel.run("%load_ext nbkit")
    message = kernel.send("%cluster attach long")
    text = kernel.collect(message).text
    until = time.monotonic() + 30
    while "Out[0-1]: 42" not in text and time.monotonic() < until:
        text += kernel.late(message, 1.0).text
    assert said(text, "made it")
    assert "Out[0-1]: 42" in text


@pytest.mark.long
def test_an_unused_cluster_ends_after_its_time_to_live_but_not_while_in_use(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        kernel.run("%load_ext nbkit")
        kernel.run("%cluster start -n 2 --cpu --name brief --ttl 3")
        family = processes_of(tmp_path, "brief")
        assert len(family) > 4
        time.sleep(4.5)
        assert "Out[0-1]: 1" in kernel.run("%%distributed\n1").text  # an attached kernel keeps it
        kernel.run("%%distributed --detach\nimport time; time.sleep(5)")
        kernel.restart(kill=True)
        time.sleep(4)
        assert all(process.is_running() for process in family)  # the time to live has passed, but a cell runs
        assert psutil.wait_procs(family, timeout=30)[1] == []
