"""Test a listening socket that admits some addresses: only these can connect."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from nbkit.rank.world.rank_place import open_listener
from nbkit.rank.world.sockets import admit_only

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters on sockets are Linux' own")


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        opened = open_listener(request.param)
    except OSError:
        pytest.skip("no such address here")
    yield opened
    opened.close()


def connects(listener: socket.socket, source: str) -> bool:
    with socket.socket(listener.family) as sock:
        sock.settimeout(0.3)
        sock.bind((source, 0))
        try:
            sock.connect(listener.getsockname()[:2])
        except TimeoutError:
            return False
        return True


def test_admitted_addresses_connect_and_others_get_no_answer(listener: socket.socket) -> None:
    own = listener.getsockname()[0]
    others = ["10.0.0.7", "fd00::7", "255.255.255.254"]
    assert admit_only(listener, [*others, own, "fd00::8"])
    assert connects(listener, own)
    if own == "127.0.0.1":
        assert not connects(listener, "127.0.0.2")
        assert admit_only(listener, ["127.0.0.2", "127.0.0.3"])
        assert [connects(listener, f"127.0.0.{last}") for last in (1, 2, 3, 4)] == [False, True, True, False]
    for nearly in ("127.0.0.3", "::2", "1::1", "::1:0:0:1"):  # some differ in only one word
        assert admit_only(listener, [*others, nearly])
        assert not connects(listener, own)


def test_a_thousand_hosts_can_be_admitted(listener: socket.socket) -> None:
    if listener.family == socket.AF_INET6:
        pytest.skip("a kernel holds some two hundred of these")
    assert admit_only(listener, [f"127.0.{n // 250}.{n % 250 + 1}" for n in range(1, 1000)])
    assert [connects(listener, source) for source in ("127.0.0.1", "127.0.0.2", "127.0.3.250")] == [False, True, True]


def test_a_store_serves_only_addresses_that_its_socket_admits() -> None:
    listener = open_listener()
    port = listener.getsockname()[1]
    assert admit_only(listener, ["127.0.0.1"])
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=5), master_listen_fd=listener.detach())
    store.set("word", "ours")
    client = TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=5))
    assert client.get("word") == b"ours"
    with socket.socket() as stranger:
        stranger.settimeout(0.3)
        stranger.bind(("127.0.0.2", 0))
        with pytest.raises(TimeoutError):
            stranger.connect(("127.0.0.1", port))
