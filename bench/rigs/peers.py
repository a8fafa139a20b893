"""How nbkit and each of its peers is started in a kernel, as its own documentation says."""

from __future__ import annotations

import time

import psutil

from bench.rigs.kernel import Kernel

CONNECT_SECONDS = 60.0


def start_nbkit(kernel: Kernel, n: int) -> None:
    """`%load_ext nbkit`, `%cluster start`."""
    kernel.run("%load_ext nbkit")
    kernel.run(f"%cluster start -n {n} --cpu --name bench")


def stop_nbkit(kernel: Kernel) -> None:
    kernel.run("%cluster stop")


def start_px(kernel: Kernel, n: int) -> None:
    """An ipyparallel cluster with its magics."""
    kernel.run(
        "import ipyparallel, logging\n"
        f"px_cluster = ipyparallel.Cluster(n={n}, log_level=logging.ERROR)\n"
        "px_client = px_cluster.start_and_connect_sync(activate=True)\n"
        "px_view = px_client[:]"
    )
    kernel.run("%%px\nx = 1")


def stop_px(kernel: Kernel) -> None:
    kernel.run("px_client.close(); px_cluster.stop_cluster_sync()")


def start_nbdistributed(kernel: Kernel, n: int) -> None:
    """`%load_ext nbdistributed`, `%dist_init`, and then until its workers are there.

    `%dist_init` returns before they have connected, and what is sent until then is lost, after 30 s of silence.
    """
    kernel.run("%load_ext nbdistributed")
    kernel.run(f"%dist_init -n {n}")
    process = psutil.Process(kernel.pid)
    deadline = time.monotonic() + CONNECT_SECONDS
    while _workers_connected(process) < n:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nbdistributed: fewer than {n} workers connected in {CONNECT_SECONDS:.0f} s")
        time.sleep(0.02)


def only_explicit_cells(kernel: Kernel) -> None:
    """nbdistributed sends every cell to its ranks by default; from now on only those marked `%%distributed`."""
    kernel.run("%dist_mode --disable")


def _workers_connected(kernel: psutil.Process) -> int:
    connections = kernel.net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == "0.0.0.0"}
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port in listening for c in connections)
