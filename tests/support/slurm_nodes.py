"""A Slurm of four nodes on this machine, as root, without systemd: its daemons and munged, in a folder of their own.

The partition gpu has two nodes with two GPUs each. These are only device files, which Slurm counts and hands out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NODES = 4
_CONF = """\
ClusterName=nbkit
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{n}] CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName=g[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{g}] CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes=n1 MaxTime=INFINITE State=UP
PartitionName=low Nodes=n[1-2] PriorityTier=1 PreemptMode=CANCEL GraceTime=30 State=UP
PartitionName=high Nodes=n[1-2] PriorityTier=9 State=UP
PartitionName=gpu Nodes=g[1-2] MaxTime=INFINITE State=UP
PartitionName=wide Nodes=n[1-2],g1 MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why there can be no Slurm here, or ""."""
    wanted = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
    absent = [name for name in wanted if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "a Slurm of our own needs root"


@contextlib.contextmanager
def running(root: Path) -> Iterator[SlurmNodes]:
    """Run a Slurm. Its commands work inside, in this process too, and its jobs find the packages in `root`."""
    folder = Path(tempfile.mkdtemp(prefix="nbkit-slurm-"))  # a socket's path must be short
    nodes = SlurmNodes(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.environment.items():
                patch.setenv(name, value)
            patch.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
            yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder)


def scontrol_that_knows_hosts(folder: Path) -> Path:
    """Return a folder for PATH with a scontrol that names this machine as the host of each node.

    The names of the nodes are not names of hosts.
    """
    own, real = folder / "bin" / "scontrol", shutil.which("scontrol")
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nif [ "$2" = hostnames ]; then echo localhost; else exec {real} "$@"; fi\n')
    own.chmod(0o755)
    return own.parent


class SlurmNodes:
    """Nodes n1 and n2, g1 and g2, of two cores each. environment: with it Slurm's commands find this cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder, (ctld, first) = self.folder, _free_ports()
        for number in range(2):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # Slurm takes only device files
        (folder / "gres.conf").write_text(f"NodeName=g[1-2] Name=gpu File={folder}/gpu[0-1]\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        conf = _CONF.format(folder=folder, ctld=ctld, n=f"{first}-{first + 1}", g=f"{first + 2}-{first + 3}")
        (folder / "slurm.conf").write_text(conf)
        self._run(
            *("munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"),
        )
        _until((folder / "munge.socket").exists, "munged")
        self._run("slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")
        for node in ("n1", "n2", "g1", "g2"):
            self._run("slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf")
        ask = ("sinfo", "-h", "-N", "-p", "debug,gpu", "-o", "%T")
        _until(lambda: self.command(*ask).split() == ["idle"] * _NODES, "slurmctld")

    def _run(self, *words: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._started.append(
                subprocess.Popen(
                    words,
                    env={**os.environ, **self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def command(self, *words: str) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30)
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the jobs that are pending, run, or are being ended."""
        return self.command("squeue", "-h", "-o", "%i %T").splitlines()

    def close(self) -> None:
        """End the jobs, then the daemons."""
        if len(self._started) > 1:
            self.command("scancel", "-u", "root")
            deadline = time.monotonic() + 15
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.1)
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports() -> tuple[int, int]:
    """Return one free port, and the first of consecutive free ports, one for each node."""
    while True:
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError, OverflowError):
            one, other = (taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
            first = other.getsockname()[1]
            for port in range(first + 1, first + _NODES):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return one.getsockname()[1], first


def _until(true: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up")
        time.sleep(0.05)
