"""The agent of one host: joins it to a cluster, then becomes the parent of its ranks.

    python -m nbkit.notebook.cluster.hosts.agent        started by the launcher, once on each host

It registers no engine. It tells the coordinator what this host is (versions, devices, address), hears whether all
hosts fit together, writes the specification of its ranks into a private folder, and replaces itself by
nbkit.bridge.parent.parent, which forks the ranks and keeps the line to the coordinator. What it has to know comes in
the environment, or over standard input; never in arguments, which everybody on the host can read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.cluster.hosts.network import addresses_here, interface_of
from nbkit.notebook.cluster.hosts.reach_probe import Probe, unanswered
from nbkit.notebook.cluster.hosts.versions import versions_here
from nbkit.notebook.cluster.launch.device_pinning import Pinning, pins_on
from nbkit.notebook.cluster.launch.platform_check import check_platform, starts_by_forking
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.own_modules import OWN_MODULES
from nbkit.wire.processes import Process, node_name

PAYLOAD = "NBKIT_AGENT"  # the variable that holds it, where it does not come over standard input
_CONNECT_SECONDS = 20.0
_INDICES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_NODEID")  # an mpirun in a job of Slurm's numbers by itself
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")


def main() -> None:
    payload = json.loads(os.environ.pop(PAYLOAD, "") or sys.stdin.readline())
    index = int(payload.get("index", _index_here()))
    host = node_name()
    link, ahead = _connect(host, payload)
    try:
        check_platform()
        machine = read_machine()
        pinning = pins_on(machine, payload["counts"][index], cpu=payload["cpu"], spares=payload["spares"])
        _check_gpus(pinning, cpu=payload["cpu"])
    except NbkitError as error:
        # One about devices speaks of the ranks of one machine.
        about_devices = payload["spares"] and isinstance(error, UsageError)
        way = f"without --spares   or   --hosts {host}:1   for fewer ranks there" if about_devices else error.hint
        link.send(event="refused", index=index, host=host, what=error.what, numbers=error.numbers, hint=way)
        sys.exit(str(error))
    address = link.sock.getsockname()[0]
    link.send(event="joined", index=index, host=host, driver=machine.survey.driver, ahead=ahead, **_facts(pinning))
    folder = _folder(payload, index, pinning, address, link, _awaited(link, address))
    _environment(payload, address)
    _become_parent(folder, link)


def _check_gpus(pinning: Pinning, *, cpu: bool) -> None:
    """Raises ClusterError where Slurm has given this host GPUs for ranks that would then compute on CPU cores."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not cpu and pinning.pins[0].kind == "cpu" and given not in ("", "0"):
        raise ClusterError(
            f"Slurm has given {given} GPU{'s' * (given != '1')} of a host, and no NVIDIA GPU is to be seen there.",
            numbers=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}, nvidia-smi lists 0",
            hint="--cpu   for ranks on its CPU cores   or   nvidia-smi   (on the host)",
        )


def _index_here() -> str:
    """Which host this is, as the launcher numbers them."""
    number = next((os.environ[name] for name in _INDICES if name in os.environ), "0")
    # Libraries that look for these variables would take them for a rank's number.
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]
    return number


def _connect(host: str, payload: dict[str, Any]) -> tuple[SignedLink, float]:
    """The line to the coordinator, and by how many seconds this host's clock is ahead of the one there."""
    place = (payload["address"], payload["port"])
    try:
        sock = socket.create_connection(place, _CONNECT_SECONDS)
    except OSError as error:
        sys.exit(f"{host} cannot reach the notebook's host at {place[0]}, port {place[1]}: {error}")
    sock.settimeout(None)
    nonce, _, clock = sock.makefile("r", buffering=1).readline().strip().partition(" ")
    return SignedLink(sock, key_of(payload["secret"], nonce), opened=True), time.time() - float(clock or "nan")


def _awaited(link: SignedLink, address: str) -> dict[str, Any]:
    """The word to go, once all hosts are there and fit together: they try to connect to each other first."""
    probe = Probe(address)
    try:
        while True:
            for word in link.receive() or [{"event": "ended", "why": "the start was given up"}]:
                if word["event"] == "go":
                    return word
                if word["event"] == "listen":
                    link.send(event="listens", address=address, port=probe.port)
                elif word["event"] == "reach":
                    link.send(event="reached", unanswered=unanswered(word["places"]))
                else:
                    sys.exit(word["why"])
    finally:
        probe.close()


def _facts(pinning: Pinning) -> dict[str, Any]:
    return {
        "versions": versions_here(),
        "device": "cuda" if pinning.pins[0].kind == "gpu" else "cpu",
        "backend": pinning.backend,
        "labels": [pin.label for pin in pinning.pins],
        "reasons": [pin.why for pin in pinning.pins],
        "spares": [pin.label for pin in pinning.spares],
        "notes": list(pinning.notes),
        "addresses": addresses_here(),
    }


def _folder(
    payload: dict[str, Any], index: int, pinning: Pinning, address: str, link: SignedLink, go: dict[str, Any]
) -> Path:
    """The folder of the cluster on this host: for this user alone, gone when the ranks have ended."""
    name, counts = payload["name"], payload["counts"][: len(payload["counts"]) - payload["spare_hosts"]]
    in_reserve, pins = index >= len(counts), [pin.saved for pin in pinning.pins]
    folder = Path(tempfile.mkdtemp(prefix=f"nbkit-{name}-{index}-"))
    for part in ("logs", "output", "profile/security"):
        (folder / part).mkdir(parents=True, mode=0o700)
    engine_file = folder / "profile" / "security" / f"ipcontroller-{name}-engine.json"
    for path, content in (
        (engine_file, payload["engine"]),
        (
            folder / "spec.json",
            {
                "name": name,
                "folder": str(folder),
                "profile_dir": str(folder / "profile"),
                "engine_file": str(engine_file),
                "backend": go["backend"],
                "device": go["device"],
                "ttl": 0.0,  # the coordinator's
                "launcher": asdict(Process.of(os.getpid())),
                "forked": os.environ.get("NBKIT_START", "fork" if starts_by_forking() else "spawn") == "fork",
                "pins": [] if in_reserve else pins,
                "spares": [*(pins if in_reserve else []), *(pin.saved for pin in pinning.spares)],
                "address": address,
                "hosts": go["addresses"],
                "base": sum(counts[:index]),
                "world_size": sum(counts),
                "fenced": payload["spare_hosts"] > 0,
                "line": {
                    "fd": link.sock.fileno(),
                    "key": link.key,
                    "sent": link.sent,
                    "received": link.received,
                },
            },
        ),
    ):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
    return folder


def _environment(payload: dict[str, Any], address: str) -> None:
    """What the ranks inherit. Interfaces differ between hosts, so each finds its own; who has set one keeps it."""
    os.environ.update(payload["environment"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name := interface_of(address):
            os.environ.setdefault(variable, name)
    if Path(payload["cwd"]).is_dir():
        os.chdir(payload["cwd"])


def _become_parent(folder: Path, link: SignedLink) -> NoReturn:
    link.sock.set_inheritable(True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *OWN_MODULES, "nbkit.bridge.parent.parent", str(folder)])


if __name__ == "__main__":
    main()
