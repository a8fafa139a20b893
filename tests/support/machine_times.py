"""Times of each launcher compared with a cluster on one machine, and a check of its losses: `make machines`.

    launcher   start   cell   first error   stop   dead rank   ddp, zero3, pp, and switches between them

Slurm, SSH and MPI run on hosts of this machine, so the network between them costs nothing. Starts and cells alternate
with those of a cluster of as many ranks without a launcher.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.hosts.launcher import StartRequest
from nbkit.notebook.cluster.hosts.launchers.mpi import MpiRequest
from nbkit.notebook.cluster.hosts.launchers.slurm import SlurmRequest
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest

ROOT = Path(__file__).resolve().parents[2]
STARTS, CELLS = 3, 40
STRATEGIES = (["ddp"], ["zero3"], ["pp=2"], ["ddp", "zero3", "pp=2"])
TRAINING = """
import copy, os, time
from torch.nn.functional import mse_loss
torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
DATA = [(torch.randn(4).double(), torch.randn(1).double()) for _ in range(32)]

def trained(strategies):
    torch.manual_seed(0)
    trainer = nbkit.Trainer(
        model=lambda: copy.deepcopy(MODEL), loss=mse_loss, data=DATA, batch_size=8, seed=0, log_dir=None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), progress=False, strategy=strategies[0])
    losses = []
    for number, strategy in enumerate(strategies):
        if number:
            trainer.switch(strategy)
        losses += [record['loss'] for record in trainer.fit(9 // len(strategies))]
    return losses
"""


def main() -> int:
    """Print the tables. Return 1 if any loss differs from that of the local cluster under ddp."""
    sys.path.insert(0, str(Path(__file__).parent))
    import slurm_nodes
    import ssh_hosts

    home = tempfile.TemporaryDirectory(prefix="nbkit-machines-")
    os.environ["NBKIT_HOME"] = home.name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    local = Cluster.start(4, cpu=True, name="local")
    local.run(TRAINING)
    expected = local.run(f"trained({STRATEGIES[0]})").values[0]
    wrong = 0.0
    if why := slurm_nodes.missing():
        print(f"slurm: skipped: {why}")
    else:
        folder = tempfile.TemporaryDirectory(prefix="nbkit-slurm-")
        nodes = slurm_nodes.SlurmNodes(Path(folder.name))
        os.environ.update(nodes.environment)
        try:
            on: StartRequest = SlurmRequest(4, nodes=2, cpu=True)
            starts("slurm, 2 nodes x 2", on, 4)
            wrong = max(wrong, ways("slurm, 2 nodes x 2", on, local, expected))
        finally:
            nodes.close()
    if why := ssh_hosts.missing():
        print(f"ssh: skipped: {why}")
    else:
        hosts = ssh_hosts.SshHosts(ROOT, 8)
        os.environ["PATH"] = f"{hosts.bin}{os.pathsep}{os.environ['PATH']}"
        try:
            starts("ssh, 2 hosts x 4", over_ssh(hosts.names[:2], 4), 8)
            starts("ssh, 8 hosts x 1", over_ssh(hosts.names, 1), 8)
            wrong = max(wrong, ways("ssh, 2 hosts x 2", over_ssh(hosts.names[:2], 2), local, expected))
            if shutil.which("mpirun") is None:
                print("mpi: skipped: not installed: mpirun (apt-get install openmpi-bin)")
            else:
                os.environ |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
                by_mpi = MpiRequest(over_ssh(hosts.names[:2], 2).hosts, cpu=True)
                starts("mpi, 2 hosts x 2", by_mpi, 4)
                wrong = max(wrong, ways("mpi, 2 hosts x 2", by_mpi, local, expected))
        finally:
            hosts.close()
    local.stop()
    return int(wrong > 1e-9)


def over_ssh(names: tuple[str, ...], ranks: int) -> SshRequest:
    return SshRequest(tuple((name, ranks) for name in names), cpu=True)


def starts(what: str, on: StartRequest, n: int) -> None:
    """Print the seconds until a cluster is ready, and those of one with n ranks on this machine."""
    taken: dict[str, list[float]] = {"local": [], "there": []}
    for number in range(STARTS):
        for where, request in (("local", None), ("there", on)):
            began = time.monotonic()
            cluster = Cluster.start(None if request else n, cpu=request is None, name=f"{where}{number}", on=request)
            taken[where].append(time.monotonic() - began)
            cluster.stop()
    local, there = (statistics.median(taken[where]) for where in ("local", "there"))
    each = " ".join(f"{one:.1f}/{other:.1f}" for one, other in zip(taken["there"], taken["local"], strict=True))
    print(f"{what}: ready in {there:.1f} s, {n} ranks on this machine in {local:.1f} s (in turns: {each})", flush=True)


def ways(name: str, on: StartRequest, local: Cluster, expected: list[float]) -> float:
    """Print the times of 4 ranks there. Return the largest relative difference of losses from `expected`."""
    cluster = Cluster.start(on=on, name="there")
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        errors, sys.stderr = sys.stderr, nowhere
        try:
            cluster.run(TRAINING)
            cells = [(seconds(lambda: cluster.run("1")), seconds(lambda: local.run("1"))) for _ in range(CELLS)]
            losses = {tuple(each): cluster.run(f"trained({each})").values[0] for each in STRATEGIES}
            broken = [interrupted(local), interrupted(cluster)]
            dead = seconds(lambda: failed(cluster, "os.kill(os.getpid(), 9) if rank == 3 else dist.barrier()"))
            cluster.stop()
        finally:
            sys.stdout, sys.stderr = shown, errors
    differences = [
        abs(one - other) / abs(other) for found in losses.values() for one, other in zip(found, expected, strict=True)
    ]
    there, here = (1e3 * statistics.median(each) for each in zip(*cells, strict=True))
    ratios = statistics.quantiles((one / other for one, other in cells), n=4)
    print(
        f"{name}: a cell {there:.1f} ms, on this machine {here:.1f} ms, ratio {ratios[1]:.2f} [{ratios[0]:.2f}, "
        f"{ratios[2]:.2f}] (quartiles of {CELLS} pairs); first error {broken[1][0]:.2f} s, here {broken[0][0]:.2f}; "
        f"stop {broken[1][1]:.2f} s, here {broken[0][1]:.2f}; dead rank {dead:.2f} s; "
        f"largest relative difference of losses {max(differences):.1e}",
        flush=True,
    )
    return max(differences)


def interrupted(cluster: Cluster) -> tuple[float, float]:
    """Return the seconds until the error of one rank arrives, and from a stop to the end of a waiting cell."""
    error = seconds(lambda: failed(cluster, "1 / 0 if rank == 3 else dist.barrier()"))
    handle = cluster.run("import time\ndist.barrier() if rank else time.sleep(600)", detach=True)
    time.sleep(0.5)
    return error, seconds(lambda: handle.stop(end_after=30))


def seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def failed(cluster: Cluster, cell: str) -> None:
    try:
        cluster.run(cell)
    except CellError:
        return
    raise AssertionError("the cell should have failed")


if __name__ == "__main__":
    sys.exit(main())
