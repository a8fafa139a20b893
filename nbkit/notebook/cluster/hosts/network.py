"""Addresses of this machine. The operating system is asked which address it would use for a connection."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from nbkit.errors import ClusterError

_BACKLOG = 1024


def address_towards(hosts: Sequence[str]) -> str:
    """Return the address of this machine at which all of `hosts` (names or addresses) can reach it.

    Raises ClusterError for a name without an address, and if no single address serves all of them.
    """
    found = {_source(host): host for host in hosts}
    outward = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if len(outward) > 1:
        raise ClusterError(
            "This machine has no single address that all hosts can reach.",
            numbers=", ".join(f"{found[address]} from {address}" for address in outward),
            hint="start on hosts of one network",
        )
    return next(iter(outward or found))


def _source(host: str) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing; the system picks route and source
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"The host {host} has no address here.", numbers=str(error), hint=f"getent hosts {host}   (in a terminal)"
        ) from None


def interface_of(address: str) -> str:
    """Return the network interface that has `address`, "" if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return ""


def addresses_here() -> list[str]:
    """Return every address that this machine may use to reach another one, or itself, depending on the route."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (one for each in psutil.net_if_addrs().values() for one in each if one.family in families)
    return sorted({one.address.partition("%")[0] for one in found})


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at `address`, on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
