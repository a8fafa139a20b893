"""Start nbkit and each of its peers in a kernel, as their documentation says."""

from __future__ import annotations

import time

import psutil

from bench.rigs.kernel import Kernel

CONNECT_SECONDS = 60.0


def start_nbkit(kernel: Kernel, n: int) -> None:
    """Load nbkit and start a cluster of `n` ranks."""
    kernel.run("%load_ext nbkit")
    kernel.run(f"%cluster start -n {n} --cpu --name bench")


def stop_nbkit(kernel: Kernel) -> None:
    kernel.run("%cluster stop")


def start_px(kernel: Kernel, n: int) -> None:
    """Start an ipyparallel cluster of `n` engines, with its magics."""
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
    """Load nbdistributed, start it with `%dist_init`, and wait until its workers have connected.

    `%dist_init` returns earlier. A cell that is sent before the workers have connected is lost after 30 s.
    Raises TimeoutError if they do not connect.
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
    """Make nbdistributed send only cells marked `%%distributed` to its ranks. By default it sends every cell."""
    kernel.run("%dist_mode --disable")


def _workers_connected(kernel: psutil.Process) -> int:
    connections = kernel.net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == "0.0.0.0"}
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port in listening for c in connections)
