"""Links of a given rate between ranks on one machine. As with network cards, each rank sends and receives at this rate.

Every rank is in a network namespace with one interface, whose other end is at a switch (a bridge in its own namespace).
`tc tbf` limits both ends: what a rank sends waits in its own namespace, as at a network card; what others send to it
waits at the switch. A node of several ranks has a switch without limits, and one link from there to the other nodes.
Needs root, `ip`, `tc`, `unshare` and `nsenter`. The host's own network does not change.
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
# The burst, which leaves at once after a pause. One packet, so that the rate limits small messages too; but at least
# the bytes of 0.1 ms, because a timer may be late by so much.
_PACKET, _LATE, _QUEUE = _MTU + 100, 1e-4, 64 << 20


class TbfLinks:
    """The links of `ranks` ranks, `node` on each node.

    Each rank calls `enter` before it opens a socket: `Ranks(..., place=links.enter)`.
    """

    def __init__(self, ranks: int, *, node: int = 1) -> None:
        self._ranks, self._node = ranks, node

    def __enter__(self) -> Self:
        """Make the links. Raises OSError with the message of the tool if that is not possible."""
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise OSError(f"there is no {missing[0]}")
        # `cat` ends with this process, which holds its input open.
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
        """Return the callable that moves a rank to its link."""
        return Entrance(self._switch.pid, self._node)

    @contextmanager
    def at(self, speed: float, pids: Sequence[int]) -> Iterator[None]:
        """Limit both directions of each link to `speed` bytes per second within this context. pids: of the ranks."""
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
        """Yield commands for `ip`. The other end of a port belongs to a rank, or to the switch of a node."""
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
    """A callable that moves a rank to its link. switch: a pid in the switch's namespace. node: ranks on each node."""

    switch: int
    node: int = 1

    def __call__(self, rank: int) -> dict[str, str]:
        """Move this process into a namespace with the link of `rank` and return environment variables for torch.

        The process may have only one thread. Raises OSError if no namespace can be made.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace can be made")
        own = os.getpid()
        _run("ip", self.switch, [f"link set end{rank} netns {own}"])
        up = ["link set lo up", f"link set end{rank} name eth0", f"addr add {_address(rank)}/24 dev eth0"]
        _run("ip", own, [*up, f"link set eth0 mtu {_MTU} up"])
        for name, value in {"tcp_early_retrans": 0, "tcp_slow_start_after_idle": 0}.items():
            # These links lose nothing, so retransmission and slow start are not needed.
            Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))
        name = {"SLURMD_NODENAME": f"node{rank // self.node}"} if self.node > 1 else {}
        return {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "eth0", **name}


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} mtu {_MTU} up"]


def _cable(port: str, end: str, switch: str) -> list[str]:
    """Return the commands for a cable with one end plugged into `switch`."""
    return [f"link add {port} mtu {_MTU} type veth peer name {end} mtu {_MTU}", f"link set {port} master {switch} up"]


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _run(tool: str, pid: int, lines: Iterable[str]) -> None:
    """Run commands of `tool` in the network namespace of a process. Raises OSError with the tool's message."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{tool}: {done.stderr.strip() or done.stdout.strip()}")
