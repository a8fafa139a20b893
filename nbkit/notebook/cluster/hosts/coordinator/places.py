"""Which hosts of a cluster have joined, which ranks each holds, and which is in reserve for one that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.progress import Progress
from nbkit.wire.link import SignedLink


class Host:
    """A host whose agent has connected. facts: what it has said of itself. has_taken_place: it was in reserve."""

    def __init__(self, link: SignedLink) -> None:
        self.link, self.has_taken_place = link, False
        self.facts: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return str(self.facts["host"])


class Places:
    """counts: ranks of each host; the last `spare_hosts` of them hold none until they take the place of another one.

    hosts: index -> host, of those that are there.
    """

    def __init__(self, counts: Sequence[int], spare_hosts: int) -> None:
        self.total, self.counts = len(counts), tuple(counts[: len(counts) - spare_hosts])
        self.hosts: dict[int, Host] = {}
        self._facts: list[dict[str, Any]] = []  # of the hosts that hold ranks, once all have joined

    @property
    def hold_ranks(self) -> bool:
        """Whether any host is left that holds ranks."""
        return any(index < len(self.counts) for index in self.hosts)

    @property
    def in_reserve(self) -> list[Host]:
        return [host for index, host in sorted(self.hosts.items()) if index >= len(self.counts)]

    def ranks_of(self, index: int) -> range:
        """Of a host in reserve: none."""
        base = sum(self.counts[:index])
        return range(base, base + (self.counts[index] if index < len(self.counts) else 0))

    def settle(self) -> list[dict[str, Any]]:
        """All have joined: what they have said of themselves, in their order."""
        facts = [self.hosts[index].facts for index in range(self.total)]
        self._facts = facts[: len(self.counts)]
        return facts

    def placed(self, host: Host, rank: int, label: str, reason: str, spares: Sequence[str]) -> None:
        """A rank may have gone to a spare device of its host."""
        at = rank - self.ranks_of(host.facts["index"]).start
        host.facts["labels"][at], host.facts["reasons"][at] = label, reason
        host.facts["spares"] = list(spares)

    def take_place(self, index: int) -> Host | None:
        """Have a host in reserve take the place of the one of that index, which is gone; None where there is none.

        The first host, whose parent decides who is replaced and where the store of the world is, has no substitute.
        """
        count = len(self.ranks_of(index))
        fit = [host for host in self.in_reserve if len(host.facts["labels"]) >= count]
        if not fit or index == 0 or 0 not in self.hosts:
            return None
        host = self.hosts[index] = self.hosts.pop(fit[0].facts["index"])
        facts = self._facts[index] = host.facts
        facts |= {"index": index, "spares": [*facts["labels"][count:], *facts["spares"]]}
        facts |= {key: facts[key][:count] for key in ("labels", "reasons")}
        host.has_taken_place = True
        host.link.send(event="take_place", base=self.ranks_of(index).start, count=count)
        return host

    def shown(self, state: Progress) -> Progress:
        """`state`, with the devices of the ranks and what is in reserve."""
        return progress.with_devices(state, self._facts, [host.name for host in self.in_reserve])
