"""The agent of one host: joins it to a cluster, then becomes the parent of its ranks.

    python -m nbkit.notebook.cluster.hosts.agent        started by the launcher, once on each host

The agent reports versions, devices and address of its host to the coordinator. When all hosts fit together, it writes
the specification of its ranks into a private folder. Then it replaces itself by nbkit.bridge.parent.parent, which forks
the ranks and keeps the connection to the coordinator. Its input comes in the environment or over standard input, never
in arguments, which every user of the host can read.

Two checks run before any rank is forked. First, are the versions on the hosts compatible (`check_versions`)? Second,
can the hosts connect to each other? Each agent listens for a moment and tries to connect to others (`Probe`,
`unanswered`); no data is sent. Without this check, ranks would wait a minute to form a world, and then fail.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import nbkit
from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.cluster.hosts.network import addresses_here, interface_of, listen_at
from nbkit.notebook.cluster.launch.pins import Pinning, pins_on
from nbkit.notebook.cluster.launch.platform_check import check_platform, starts_by_forking, torch_version
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import (
    EndNow,
    ForAgent,
    ForCoordinator,
    HostJoined,
    HostsTried,
    HostUnfit,
    Listen,
    Listening,
    StartRanks,
    TryHosts,
    deliver,
    handles,
)
from nbkit.wire.processes import Process, node_name
from nbkit.wire.user_code import OWN_MODULES

AgentLine: TypeAlias = SignedLink[ForCoordinator, ForAgent]

ANSWER_SECONDS = 5.0  # the system retries a connection after 1 s and 3 s


class Probe:
    """A socket that listens at `address` until it is closed. The operating system accepts the connections."""

    def __init__(self, address: str) -> None:
        self._listening = listen_at(address)
        self.port = int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()


def unanswered(places: Iterable[tuple[int, str, int]], seconds: float = ANSWER_SECONDS) -> list[tuple[int, str]]:
    """Connect to each (number of the host, address, port), all at once. Return (number, error) of those that failed."""
    failed: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        for host, address, port in places:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sock.setblocking(False)
            if (code := sock.connect_ex((address, port))) in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, host)
            else:
                failed[host] = os.strerror(code)
                sock.close()
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
                selector.unregister(sock)
                sock.close()
        for key in list(selector.get_map().values()):
            failed[key.data] = f"no answer within {seconds:.0f} s"
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
    return sorted(failed.items())


_PARTS = {"Python": 2, "torch": 9, "nbkit": 9, "ipyparallel": 2}  # how many leading parts of a version must agree
_OF_NOTEBOOK = ("Python", "nbkit", "ipyparallel")  # these must also agree with the notebook's process

CLOCK_SECONDS = 0.5
"""The allowed difference between clocks. It includes a message's delay, which may be some tenths of a second."""


def versions_here() -> dict[str, str]:
    """Return the versions that are installed for this process."""
    return {
        "Python": platform.python_version(),
        "torch": torch_version(),
        "nbkit": nbkit.__version__,
        "ipyparallel": metadata.version("ipyparallel"),
    }


def check_versions(hosts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ClusterError, naming the hosts, if their installed versions differ.

    hosts: name -> its versions, by package.
    """
    here = versions_here()
    for name in _PARTS:
        found = {host: versions[name] for host, versions in hosts.items()}
        if name in _OF_NOTEBOOK:
            found = {"this notebook": here[name], **found}
        if len({_compared(name, version) for version in found.values()}) > 1:
            with_it: dict[str, list[str]] = {}
            for host, version in found.items():
                with_it.setdefault(version, []).append(host)
            raise ClusterError(
                f"The hosts have different versions of {name}.",
                numbers="; ".join(f"{version} on {', '.join(each)}" for version, each in with_it.items()),
                hint="use one environment everywhere: --python PATH names the one on the hosts",
            )


def notes_on(drivers: Mapping[str, str], clocks: Mapping[str, float]) -> tuple[str, ...]:
    """Return notes about differences between hosts that do not prevent a cluster.

    drivers: host -> version of NVIDIA's driver, "" without GPUs. clocks: host -> seconds by which its clock is ahead of
    the coordinator's, including the message's delay.
    """
    notes = []
    if len({driver for driver in drivers.values() if driver}) > 1:
        each = ", ".join(f"{driver or 'none'} on {host}" for host, driver in drivers.items())
        notes.append(f"the hosts have different versions of NVIDIA's driver: {each}")
    if max(clocks.values()) - min(clocks.values()) > CLOCK_SECONDS:
        each = ", ".join(f"{ahead - min(clocks.values()):.1f} s on {host}" for host, ahead in clocks.items())
        notes.append(
            f"the clocks of the hosts differ, so times of their ranks in dashboard and traces do too: ahead by {each}"
        )
    return tuple(notes)


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[: _PARTS[name]])


PAYLOAD = "NBKIT_AGENT"  # the variable with the input, if it does not come over standard input
_CONNECT_SECONDS = 20.0
# The first variable that is set counts: in a Slurm job, mpirun sets a number of its own too.
_INDICES = ("NBKIT_HOST_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_NODEID")
_MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")


def main() -> None:
    payload = json.loads(os.environ.pop(PAYLOAD, "") or sys.stdin.readline())
    index = _index_here()
    host = node_name()
    link, ahead = _connect(host, payload)
    try:
        check_platform()
        machine = read_machine()
        pinning = pins_on(machine, payload["counts"][index], cpu=payload["cpu"], spares=payload["spares"])
        _check_gpus(pinning, cpu=payload["cpu"])
    except NbkitError as error:
        # The hint of this error is written for a cluster on one machine.
        about_devices = payload["spares"] and isinstance(error, UsageError)
        way = f"without --spares   or   --hosts {host}:1   for fewer ranks there" if about_devices else error.hint
        link.send(HostUnfit(host, error.what, error.numbers, way))
        sys.exit(str(error))
    address = link.sock.getsockname()[0]
    link.send(_joined(index, host, machine.survey.driver, ahead, pinning))
    folder = _folder(payload, index, pinning, address, link, _await_start(link, address))
    _environment(payload, address)
    _become_parent(folder, link)


def _check_gpus(pinning: Pinning, *, cpu: bool) -> None:
    """Raise ClusterError if Slurm has given this host GPUs but its ranks would compute on CPU cores."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not cpu and pinning.pins[0].kind == "cpu" and given not in ("", "0"):
        raise ClusterError(
            f"Slurm has given {given} GPU{'s' * (given != '1')} of a host, and no NVIDIA GPU is to be seen there.",
            numbers=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}, nvidia-smi lists 0",
            hint="--cpu   for ranks on its CPU cores   or   nvidia-smi   (on the host)",
        )


def _index_here() -> int:
    """Return the number that the launcher gave to this host."""
    number = next((os.environ[name] for name in _INDICES if name in os.environ), "0")
    # A library in a rank would take these variables for the rank's own number.
    for name in [name for name in os.environ if name.startswith(_MPI_PREFIXES)]:
        del os.environ[name]
    return int(number)


def _connect(host: str, payload: dict[str, Any]) -> tuple[AgentLine, float]:
    """Connect to the coordinator. Return the connection, and by how many seconds this host's clock is ahead."""
    place = (payload["address"], payload["port"])
    try:
        sock = socket.create_connection(place, _CONNECT_SECONDS)
    except OSError as error:
        sys.exit(f"{host} cannot reach the notebook's host at {place[0]}, port {place[1]}: {error}")
    sock.settimeout(None)
    nonce, _, clock = sock.makefile("r", buffering=1).readline().strip().partition(" ")
    return SignedLink(sock, key_of(payload["secret"], nonce), opened=True), time.time() - float(clock or "nan")


class JoinedAgent:
    """Handles an agent's messages between HostJoined and StartRanks. start: StartRanks, or None until it comes."""

    def __init__(self, link: AgentLine, address: str, probe: Probe) -> None:
        self.link, self.address, self.probe = link, address, probe
        self.start: StartRanks | None = None

    @handles(Listen)
    def _on_listen(self, _: Listen) -> None:
        self.link.send(Listening(self.address, self.probe.port))

    @handles(TryHosts)
    def _on_try(self, hosts: TryHosts) -> None:
        self.link.send(HostsTried(tuple(unanswered(hosts.places))))

    @handles(StartRanks)
    def _on_start(self, start: StartRanks) -> None:
        self.start = start

    @handles(EndNow)
    def _on_end(self, end: EndNow) -> None:
        sys.exit(end.why)


def _await_start(link: AgentLine, address: str) -> StartRanks:
    """Wait for StartRanks, which comes when all hosts have joined and passed the checks."""
    agent = JoinedAgent(link, address, Probe(address))
    try:
        while agent.start is None:
            if (messages := link.receive()) is None:
                sys.exit(str(link.refused or "the start was given up"))
            for message in messages:
                deliver(message, agent)
        return agent.start
    finally:
        agent.probe.close()


def _joined(index: int, host: str, driver: str, ahead: float, pinning: Pinning) -> HostJoined:
    return HostJoined(
        index=index,
        host=host,
        driver=driver,
        ahead=ahead,
        versions=versions_here(),
        device=pinning.device,
        backend=pinning.backend,
        labels=tuple(pin.label for pin in pinning.pins),
        reasons=tuple(pin.why for pin in pinning.pins),
        spares=tuple(pin.label for pin in pinning.spares),
        notes=tuple(pinning.notes),
        addresses=tuple(addresses_here()),
    )


def _folder(
    payload: dict[str, Any], index: int, pinning: Pinning, address: str, link: AgentLine, start: StartRanks
) -> Path:
    """Create and return the cluster's folder on this host.

    Only this user can read it. It is removed when the ranks have ended.
    """
    name, counts = payload["name"], payload["counts"]
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
                "backend": start.backend,
                "device": start.device,
                "ttl": 0.0,  # the coordinator has the time to live
                "launcher": asdict(Process.of(os.getpid())),
                "forked": os.environ.get("NBKIT_START", "fork" if starts_by_forking() else "spawn") == "fork",
                "pins": [pin.saved for pin in pinning.pins],
                "spares": [pin.saved for pin in pinning.spares],
                "address": address,
                "hosts": start.addresses,
                "base": sum(counts[:index]),
                "world_size": sum(counts),
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
    """Set the environment and the working directory that the ranks inherit.

    Network interfaces differ between hosts, so each host finds its own. A value that the user has set is kept.
    """
    os.environ.update(payload["environment"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name := interface_of(address):
            os.environ.setdefault(variable, name)
    if Path(payload["cwd"]).is_dir():
        os.chdir(payload["cwd"])


def _become_parent(folder: Path, link: AgentLine) -> NoReturn:
    link.sock.set_inheritable(True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *OWN_MODULES, "nbkit.bridge.parent.parent", str(folder)])


if __name__ == "__main__":
    main()
