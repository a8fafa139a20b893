"""Test which connections a host tries before ranks are forked, and what it reports."""

import socket

import pytest

from nbkit.notebook.cluster.hosts.agent import Probe, unanswered
from nbkit.notebook.cluster.hosts.coordinator import hosts_to_try


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 17, 256])
def test_every_host_is_tried_and_each_of_many_hosts_tries_few(n: int) -> None:
    tried = [hosts_to_try(own, n) for own in range(n)]

    assert all(own not in others and set(others) <= set(range(n)) for own, others in enumerate(tried))
    assert {other for others in tried for other in others} == (set(range(n)) if n > 1 else set())
    assert all(len(others) == n - 1 if n <= 5 else len(others) <= 2 * n.bit_length() for others in tried)


def test_a_host_that_does_not_listen_is_reported_with_the_system_error() -> None:
    probe = Probe("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    assert unanswered([(0, "127.0.0.1", probe.port)]) == []
    assert unanswered([(0, "127.0.0.1", probe.port), (4, "127.0.0.1", port)]) == [(4, "Connection refused")]
    probe.close()
    assert unanswered([(0, "127.0.0.1", probe.port)]) == [(0, "Connection refused")]
