"""Links by rate between ranks on one machine, as network cards have it: each rank sends and receives at its own.

Every rank lives in a network namespace with one interface, which ends at a switch (a bridge in a namespace of its own).
`tc tbf` stands on both ends of it: what a rank sends waits in its own namespace, as at a card, and what others send to
it at the switch. Nodes of several ranks have a switch each, on which nothing limits them, and between it and the others
one link for all of them. Needs root, `ip`, `tc`, `unshare` and `nsenter`; the host's own network is left alone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_CLONE_NEWNET = 0x40000000
_MTU = 4000
# What goes at once after a pause: a packet, so that of small messages too nearly all goes at the rate; but as much as
# goes in 0.1 ms, by which a timer may be late.
_PACKET, _LATE, _QUEUE = _MTU + 100, 1e-4, 64 << 20


class TbfLinks:
    """Of so many ranks, `node` on each node. Each has to `enter` before it opens a socket: `Ranks(..., place=...)`."""

    def __init__(self, ranks: int, *, node: int = 1) -> None:
        self._ranks, self._node = ranks, node

    def __enter__(self) -> Self:
        """Raises OSError, with what the tools say, where this is not possible."""
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise OSError(f"there is no {missing[0]}")
        # It ends with this process: then nothing holds its input open.
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._switch.stdout is not None
        try:
            if not self._switch.stdout.readline():
                raise OSError("no network namespace can be made")
            _run("ip", self._switch.pid, self._cables())
            with self.at(1e9, []):
                pass
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.kill()
        self._switch.wait()

    @property
    def enter(self) -> Entrance:
        """For the ranks."""
        return Entrance(self._switch.pid, self._node)

    @contextmanager
    def at(self, speed: float, pids: Sequence[int]) -> Iterator[None]:
        """Both directions of each link have this rate meanwhile, in bytes per second. pids: of the ranks."""
        nodes = range(self._ranks // self._node)
        own = [(self._switch.pid, [f"port{number}" for number in nodes])]
        if self._node == 1:
            own += [(pid, ["eth0"]) for pid in pids]
        else:
            own += [(self._switch.pid, [f"up{number}" for number in nodes])]
        for pid, devices in own:
            self._set(pid, devices, speed)
        try:
            yield
        finally:
            for pid, devices in own:
                self._set(pid, devices, None)

    def _cables(self) -> Iterator[str]:
        """For `ip`. A port's other end is a rank's, or goes up from the switch of a node."""
        yield from _bridge("switch")
        for number in range(self._ranks // self._node):
            if self._node == 1:
                yield from _cable(f"port{number}", f"end{number}", "switch")
                continue
            yield from _bridge(f"node{number}")
            yield from _cable(f"port{number}", f"up{number}", "switch")
            yield f"link set up{number} master node{number} up"
            for rank in range(number * self._node, (number + 1) * self._node):
                yield from _cable(f"of{rank}", f"end{rank}", f"node{number}")

    def _set(self, pid: int, devices: Sequence[str], speed: float | None) -> None:
        lines = [f"qdisc del dev {device} root" for device in devices]
        if speed is not None:
            how = f"tbf rate {8 * speed:.0f}bit burst {max(_PACKET, _LATE * speed):.0f} limit {_QUEUE}"
            lines = [f"qdisc add dev {device} root {how}" for device in devices]
        _run("tc", pid, lines)


@dataclass(frozen=True)
class Entrance:
    """switch: the process in whose namespace the other ends of the links are. node: ranks on each."""

    switch: int
    node: int = 1

    def __call__(self, rank: int) -> dict[str, str]:
        """Move this process, of one thread, into a namespace with the link of `rank`. Returns what torch is to know."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace can be made")
        own = os.getpid()
        _run("ip", self.switch, [f"link set end{rank} netns {own}"])
        up = ["link set lo up", f"link set end{rank} name eth0", f"addr add {_address(rank)}/24 dev eth0"]
        _run("ip", own, [*up, f"link set eth0 mtu {_MTU} up"])
        for name, value in {"tcp_early_retrans": 0, "tcp_slow_start_after_idle": 0}.items():
            # Nothing is lost here, and nothing needs to be sent again nor begun slowly.
            Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))
        name = {"SLURMD_NODENAME": f"node{rank // self.node}"} if self.node > 1 else {}
        return {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "eth0", **name}


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} mtu {_MTU} up"]


def _cable(port: str, end: str, switch: str) -> list[str]:
    """Two ends, of which one is plugged in."""
    return [f"link add {port} mtu {_MTU} type veth peer name {end} mtu {_MTU}", f"link set {port} master {switch} up"]


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _run(tool: str, pid: int, lines: Iterable[str]) -> None:
    """In the network namespace of a process. Raises OSError with what the tool says."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{tool}: {done.stderr.strip() or done.stdout.strip()}")
