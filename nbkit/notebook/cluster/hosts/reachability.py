"""Whether the hosts of a cluster can connect to each other: asked before a world forms, and answered by their names."""

from __future__ import annotations

from collections.abc import Sequence

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.cells.client import Client

_CALL_SECONDS = 30.0
_SHOWN = 4


def check_reach(labels: Sequence[str], client: Client) -> None:
    """Raise ClusterError, within seconds, where a host cannot connect to another one.

    labels: of the ranks, "host: device"; the first rank of each host does it for all.
    """
    first: dict[str, int] = {}
    for rank, label in enumerate(labels):
        first.setdefault(label.partition(":")[0], rank)
    hosts, ranks = list(first), list(first.values())
    if len(hosts) < 2:
        return
    opened = client.call_and_wait(ranks, "nbkit.bridge.calls:open_probe", timeout=_CALL_SECONDS)
    places = [opened[rank] for rank in ranks]
    found = client.call_and_wait(ranks, "nbkit.bridge.calls:unanswered", ranks, places, timeout=_CALL_SECONDS)
    client.call_and_wait(ranks, "nbkit.bridge.calls:close_probe", timeout=_CALL_SECONDS)
    ways = [(source, to, why) for source, rank in enumerate(ranks) for to, why in found[rank].items()]
    if ways:
        source, to, _ = ways[0]
        shown = [
            f"from {hosts[source]} ({places[source][0]}) to {hosts[to]} ({places[to][0]}, port {places[to][1]}): {why}"
            for source, to, why in ways[:_SHOWN]
        ]
        more = f"; and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
        raise ClusterError(
            f"The host {hosts[source]} cannot connect to {hosts[to]}.",
            numbers="; ".join(shown) + more,
            hint=f"ping {places[to][0]}   (in a terminal on {hosts[source]}): a firewall between the hosts has to let "
            "connections to all ports pass; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another network",
        )
