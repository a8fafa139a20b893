"""Test `nbkit selftest` on ranks of other hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import assert_gone
from slurm_nodes import SlurmNodes
from ssh_hosts import SshHosts

ITEMS = ("ddp", "torchrun", "telemetry-ddp", "transports")


def tried(folder: Path, *options: str) -> tuple[str, str]:
    """Return (its output, its report), with one space between words."""
    only = [word for item in ITEMS for word in ("--only", item)]
    command = [sys.executable, "-m", "nbkit", "selftest", "--cpu", *options, *only]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, said + done.stderr
    return said, " ".join((folder / "nbkit-selftest.md").read_text().split())


@pytest.mark.long
def test_selftest_works_over_ssh(ssh: SshHosts, tmp_path: Path) -> None:
    said, report = tried(tmp_path, "--hosts", ",".join(f"{name}:1" for name in ssh.names))

    assert "4 items on 2 CPU ranks on 2 hosts" in said and "2 ok, 2 left out" in said
    assert "on all ranks; the first of each host saves" in said
    assert "the hosts do not see the folder of the report" in said and "ranks send over gloo" in said
    assert "rank 1 " in report
    assert_gone(lambda: [each for name in ssh.names for each in ssh.processes(name)])


@pytest.mark.long
def test_selftest_works_in_a_slurm_job_described_in_nbkit_toml(slurm: SlurmNodes, tmp_path: Path) -> None:
    (tmp_path / "nbkit.toml").write_text('[clusters]\nnodes = "--slurm -n 2 --nodes 2"\n')
    said, _ = tried(tmp_path, "--on", "nodes")

    assert "4 items on 2 CPU ranks on 2 hosts" in said and "3 ok, 1 left out" in said
    assert_gone(slurm.jobs)
