"""Whether the hosts of a cluster, those in reserve too, can connect to each other: asked of their agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.hosts.coordinator.places import Host

_SHOWN = 4


class Reachability:
    """hosts: all of them, in their order. First each listens, then each tries to connect to others."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._places: dict[int, tuple[str, int]] = {}
        self._failed: dict[int, list[tuple[int, str]]] = {}
        for host in hosts:
            host.link.send(event="listen")

    @property
    def answered(self) -> list[Host]:
        """Those that have told what they have found."""
        return [self._hosts[number] for number in sorted(self._failed)]

    def listens(self, host: Host, message: dict[str, Any]) -> None:
        """A host listens; once all do, each hears whom it is to try."""
        self._places[host.facts["index"]] = message["address"], message["port"]
        if len(self._places) == len(self._hosts):
            for number, each in enumerate(self._hosts):
                tried = hosts_to_try(number, len(self._hosts))
                each.link.send(event="reach", places=[(other, *self._places[other]) for other in tried])

    def reached(self, host: Host, message: dict[str, Any]) -> bool:
        """A host has tried; whether all have. Raises ClusterError then, where one cannot connect to another one."""
        self._failed[host.facts["index"]] = [(number, why) for number, why in message["unanswered"]]
        if len(self._failed) < len(self._hosts):
            return False
        ways = [(source, *to) for source in sorted(self._failed) for to in self._failed[source]]
        if ways:
            source, other, _ = ways[0]
            more = f"; and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
            first, second = self._hosts[source].name, self._hosts[other].name
            raise ClusterError(
                f"The host {first} cannot connect to {second}.",
                numbers="; ".join(self._way(*way) for way in ways[:_SHOWN]) + more,
                hint=f"ping {self._places[other][0]}   (in a terminal on {first}): a firewall between the hosts has to "
                "let connections to all ports pass; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another network",
            )
        return True

    def _way(self, source: int, other: int, why: str) -> str:
        start, (address, port) = self._places[source][0], self._places[other]
        return f"from {self._hosts[source].name} ({start}) to {self._hosts[other].name} ({address}, port {port}): {why}"


def hosts_to_try(own: int, n: int) -> list[int]:
    """Which of `n` hosts number `own` tries: all of up to five, of more about 2 log2 n, so that each is tried too."""
    steps = [1 << power for power in range(max(1, n.bit_length()))]
    return sorted({(own + sign * step) % n for step in steps for sign in (1, -1)} - {own})
