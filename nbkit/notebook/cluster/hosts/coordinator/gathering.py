"""The hosts of a cluster gather: from the launcher's start until all agents are there and fit together.

They are compared, and try to connect to each other, before any rank is forked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.hosts.coordinator.places import Host, Places
from nbkit.notebook.cluster.hosts.coordinator.reachability import Reachability
from nbkit.notebook.cluster.hosts.progress import Progress, Seen
from nbkit.notebook.cluster.hosts.start_request import Starter
from nbkit.notebook.cluster.hosts.versions import check_versions, notes_on

ANSWER_SECONDS = 90.0  # from the first sign of the hosts until all have answered


@dataclass(frozen=True)
class Fit:
    """What hosts that fit together start their ranks with. addresses: of all. notes: what the user is to be told."""

    backend: str
    device: str
    addresses: tuple[str, ...]
    notes: tuple[str, ...]


class Gathering:
    """places: filled by it. port: where this process listens for agents, at the starter's address."""

    def __init__(self, starter: Starter, places: Places, port: int) -> None:
        self._starter, self._places, self._port = starter, places, port
        self._first_sign = 0.0
        self._refused: list[str] = []  # agents, and why
        self._fit: Fit | None = None  # once they are compared
        self._reachability: Reachability | None = None

    def join(self, host: Host, facts: dict[str, Any]) -> str:
        """An agent is ready. Of two that have one number the first has it: why this one was refused, "" if it was not.

        Raises ClusterError where all are there and do not fit together.
        """
        index, total = facts["index"], self._places.total
        self._first_sign = self._first_sign or time.monotonic()
        if (first := self._places.hosts.get(index)) is not None:
            why = f"an agent on {facts['host']} came as host {index} of {total}, which {first.name} is already"
            print(f"{time.strftime('%H:%M:%S')} coordinator: {why}: refused", flush=True)
            host.link.send(event="refused", why=why)
            self._refused.append(why)
            return why
        host.facts = facts
        self._places.hosts[index] = host
        if len(self._places.hosts) == total:
            self._fit = self._compared()
            self._first_sign = time.monotonic()  # now they are waited for to have tried each other
            self._reachability = Reachability([self._places.hosts[number] for number in range(total)])
        return ""

    def hear(self, host: Host, message: dict[str, Any]) -> Fit | None:
        """An agent tells where it listens, or what it has found. Returns what they start with, once all fit together.

        Raises ClusterError where a host cannot connect to another one.
        """
        assert self._reachability is not None
        if message["event"] == "listens":
            self._reachability.listens(host, message)
            return None
        if not self._reachability.reached(host, message):
            return None
        assert self._fit is not None
        refused = (f"{why}: it was refused" for why in self._refused)
        return replace(self._fit, notes=(*self._fit.notes, *refused))

    def progress(self, seen: Seen) -> Progress:
        """How far it is. seen: by the launcher. Raises ClusterError when nothing is left to wait for."""
        if seen.error:
            raise seen.error
        if seen.state == "over":
            raise ClusterError(
                f"{seen.words[:1].upper()}{seen.words[1:]} before the cluster was ready.",
                numbers=self._starter.log() or "its output is not here, or empty",
                hint="%cluster start   again",
            )
        if seen.state == "running":
            self._first_sign = self._first_sign or time.monotonic()
        if self._first_sign and time.monotonic() - self._first_sign > ANSWER_SECONDS:
            raise self._unanswered()
        if seen.state == "pending":
            return Progress("waiting", seen.words)
        answered = f"{len(self._places.hosts)} of {self._places.total} hosts have answered"
        return Progress("starting", f"{seen.words}; {answered}")

    def lost(self, host: Host) -> ClusterError:
        """A host that had joined is gone, or its agent."""
        index, gone = host.facts["index"], "does not answer any more" if host.link.broke else "has lost its agent"
        return ClusterError(
            f"The host {host.name} {gone}: the cluster was starting.",
            numbers=self._starter.log() or f"it had joined as host {index}, with {self._starter.counts[index]} ranks",
            hint="%cluster start   again",
        )

    def _compared(self) -> Fit:
        facts = self._places.settle()
        check_versions({one["host"]: one["versions"] for one in facts})
        differ = notes_on({one["host"]: one["driver"] for one in facts}, {one["host"]: one["ahead"] for one in facts})
        devices = {one["host"]: one["device"] for one in facts}
        if len(set(devices.values())) > 1:
            raise ClusterError(
                "Some hosts have GPUs for the ranks, and some have not.",
                numbers=", ".join(f"{host}: {device}" for host, device in devices.items()),
                hint="--cpu   or   hosts that are alike",
            )
        notes = (*(f"{one['host']}: {note}" for one in facts for note in one["notes"]), *differ)
        return Fit(
            backend="nccl" if all(one["backend"] == "nccl" for one in facts) else "gloo",
            device=facts[0]["device"],
            addresses=tuple(sorted({address for one in facts for address in one["addresses"]})),
            notes=notes,
        )

    def _unanswered(self) -> ClusterError:
        all_there = self._reachability is not None
        hosts = self._reachability.answered if self._reachability else list(self._places.hosts.values())
        here, total = [host.name for host in hosts], self._places.total
        what = f"{total - len(here)} of {total} hosts did not answer within {ANSWER_SECONDS:.0f} s."
        if self._refused and not all_there:  # the launcher has given two of them the same number
            return ClusterError(what, numbers="; ".join(self._refused), hint="%cluster start --hosts node1:4,node2:4")
        return ClusterError(
            what,
            numbers=f"answered: {', '.join(here) or 'none'}; they have to reach {self._starter.address}, port "
            f"{self._port} and above\n{self._starter.log()}".strip(),
            hint="a firewall between the hosts has to let their connections pass",
        )
