"""What each launcher takes beside a cluster on one machine, and whether it computes the same: `make machines`.

    launcher   start   cell   first error   stop   dead rank   ddp, zero3, pp, and switches between them

Four ranks each; over Slurm and SSH on two hosts of this machine, so that a wire between them costs nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nbkit import Cluster
from nbkit.errors import CellError
from nbkit.notebook.cluster.hosts.start_request import Request, SlurmRequest, SshRequest

ROOT = Path(__file__).resolve().parents[2]
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
    """Print the table; returns 1 if any loss differs from that of the local cluster under ddp."""
    sys.path.insert(0, str(Path(__file__).parent))
    import slurm_nodes
    import ssh_hosts

    home = tempfile.TemporaryDirectory(prefix="nbkit-machines-")
    os.environ["NBKIT_HOME"] = home.name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    print("launcher  start s  cell ms  error s   stop s   dead s  largest relative difference of losses")
    expected, _ = measured("local", None, [])
    wrong = 0.0
    if why := slurm_nodes.missing():
        print(f"slurm     skipped: {why}")
    else:
        folder = tempfile.TemporaryDirectory(prefix="nbkit-slurm-")
        nodes = slurm_nodes.SlurmNodes(Path(folder.name))
        os.environ.update(nodes.environment)
        try:
            wrong = max(wrong, measured("slurm", SlurmRequest(4, nodes=2, cpu=True), expected)[1])
        finally:
            nodes.close()
    if why := ssh_hosts.missing():
        print(f"ssh       skipped: {why}")
    else:
        hosts = ssh_hosts.SshHosts(ROOT)
        os.environ["PATH"] = f"{hosts.bin}{os.pathsep}{os.environ['PATH']}"
        try:
            wrong = max(
                wrong, measured("ssh", SshRequest(tuple((name, 2) for name in hosts.names), cpu=True), expected)[1]
            )
        finally:
            hosts.close()
    return int(wrong > 1e-9)


def measured(name: str, on: Request | None, expected: list[float]) -> tuple[list[float], float]:
    """Print a line of the table; returns the losses under ddp, and how far any are from `expected` (or from these)."""
    began = time.monotonic()
    cluster = Cluster.start(None if on else 4, cpu=on is None, name=name, on=on)
    start = time.monotonic() - began
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        errors, sys.stderr = sys.stderr, nowhere
        try:
            cluster.run(TRAINING)
            cell = statistics.median(seconds(lambda: cluster.run("1")) for _ in range(20))
            error = seconds(lambda: failed(cluster, "1 / 0 if rank == 3 else dist.barrier()"))
            losses = {tuple(each): cluster.run(f"trained({each})").values[0] for each in STRATEGIES}
            handle = cluster.run("dist.barrier() if rank else time.sleep(600)", detach=True)
            time.sleep(0.5)
            stop = seconds(lambda: handle.stop(end_after=30))
            dead = seconds(lambda: failed(cluster, "os.kill(os.getpid(), 9) if rank == 3 else dist.barrier()"))
            cluster.stop()
        finally:
            sys.stdout, sys.stderr = shown, errors
    expected = expected or losses["ddp",]
    differences = [
        abs(one - other) / abs(other) for found in losses.values() for one, other in zip(found, expected, strict=True)
    ]
    print(
        f"{name:8}  {start:7.1f}  {1e3 * cell:7.1f}  {error:7.2f}  {stop:7.2f}  {dead:7.2f}  {max(differences):.1e}",
        flush=True,
    )
    return expected, max(differences)


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
