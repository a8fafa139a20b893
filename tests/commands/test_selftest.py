"""Test `nbkit selftest`: correct ranks, a planted bug, and a run that is stopped."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forked_parents import forked_parents_of_programs

from nbkit.commands import selftest
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest
from nbkit.notebook.cluster.hosts.start_options import requested, with_kept_options
from nbkit.notebook.selftest import ways_of_nccl

MAIN = """
import sys
from nbkit.commands import main

sys.exit(main(sys.argv[1:]))
"""
PLANTED = """
from nbkit.notebook import selftest

selftest.SETUP += '''
from torch.optim import AdamW
class Twice(AdamW):
    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)
if rank == 1: torch.optim.AdamW = Twice
'''
"""


def environment(folder: Path) -> dict[str, str]:
    told = {"NCCL_DEBUG": "WARN", "HUB_TOKEN": "not-to-be-told"}
    return {**os.environ, **told, "HOME": str(folder), "NBKIT_HOME": str(folder / "clusters")}


def start(folder: Path, *options: str, first: str = "") -> subprocess.Popen[str]:
    """Start the selftest. first: source that it runs before."""
    how = ["-c", first + MAIN] if first else ["-m", "nbkit"]
    command = [sys.executable, *how, "selftest", "--cpu", "-n", "2", *options]
    return subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def forked() -> Iterator[str]:
    """Yield source that makes the selftest fork the parents of its clusters: see forked_parents.py."""
    with forked_parents_of_programs() as source:
        yield source


def ended(selftest: subprocess.Popen[str]) -> tuple[int, str]:
    """Return (exit status, what it printed, with one space between words)."""
    said, _ = selftest.communicate(timeout=300)
    return selftest.returncode, " ".join(said.split())


@pytest.mark.long  # the next one covers the same output
def test_correct_ranks_are_reported_as_ok(tmp_path: Path) -> None:
    status, said = ended(start(tmp_path, "--only", "error", "--output", "out.md"))
    report = " ".join((tmp_path / "out.md").read_text().split())

    assert status == 0, said
    assert "error ok" in said and "1 ok" in said
    assert "| error | ok |" in report and "rank 1 named; losses" in report


@pytest.mark.long
def test_a_wrong_update_on_one_rank_fails_its_item_and_the_other_items_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: str
) -> None:
    items = [word for item in ("ddp", "bandwidth", "hsdp") for word in ("--only", item)]
    status, said = ended(start(tmp_path, *items, first=forked + PLANTED))
    report = (tmp_path / "nbkit-selftest.md").read_text()

    assert status == 1, said
    assert "ddp FAILED" in said and "bandwidth ok" in said and "hsdp left out" in said
    assert "1 ok, 1 FAILED, 1 left out" in said
    assert "## ddp failed" in report and "from one process; at most 1e-10" in report
    report = " ".join(report.split())
    assert "torch 2" in report and "Ready: %load_ext nbkit" in report and "NCCL_DEBUG WARN" in report
    assert "not-to-be-told" not in report and str(tmp_path) not in report
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "clusters"))
    assert registry.entries() == []


@pytest.mark.long
def test_a_stopped_selftest_leaves_a_report_and_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: str
) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "clusters"))
    selftest = start(tmp_path, "--only", "switch", first=forked)
    deadline = time.monotonic() + 120
    while not (entries := [entry for entry in registry.entries() if entry.ranks]):
        assert selftest.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (entry,) = entries

    selftest.send_signal(signal.SIGINT)
    status, said = ended(selftest)

    assert status == 130
    assert "Stopped. Nothing is left running." in said
    assert "selftest" in (tmp_path / "nbkit-selftest.md").read_text()
    assert registry.entries() == []
    assert not any(process.is_alive() for process in (entry.controller, entry.parent, *entry.ranks))
    assert not [child for child in psutil.Process().children() if "nbkit" in child.cmdline()]


def test_an_unknown_item_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    status, said = ended(start(tmp_path, "--only", "zero4"))

    assert status == 2
    assert "There is no item 'zero4'" in said and "zero3" in said


def test_the_transports_are_counted_from_nccls_log() -> None:
    # Written by hand in the form of NCCL 2.28, not recorded from a machine.
    log = """\
g1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
g1:11:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
g2:12:22 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/0/GDRDMA
g2:12:22 [0] NCCL INFO Channel 00 : 2[0] -> 3[1] via SHM/direct/direct
g2:12:22 [0] NCCL INFO Connected all rings
"""
    assert ways_of_nccl(log) == {"NET/IB": 2, "P2P": 1, "SHM": 1}


def test_options_in_nbkit_toml_apply_unless_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbkit.toml").write_text('[clusters]\nlarge = "--slurm -n 8 --partition gpu -- --mem=4G"\n')
    parser = argparse.ArgumentParser()
    selftest.prepare_parser(parser)
    options = parser.parse_args(["--on", "large", "-n", "4"])
    with_kept_options(options)
    assert requested(options) == SlurmRequest(4, partition="gpu", options=("--mem=4G",))
