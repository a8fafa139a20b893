"""Links by `tc tbf` between namespaces: what a rank sends and what it gets goes at its own rate, and no faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.rigs.tbf_links import TbfLinks

SIZE, SPEED = 500_000, 5e6
RANK = f"""
import socket, sys, time
from concurrent.futures import ThreadPoolExecutor
from bench.rigs.tbf_links import Entrance

rank, size = int(sys.argv[2]), {SIZE}
told = Entrance(int(sys.argv[1]))(rank)
server = socket.create_server(("0.0.0.0", 5000))
print(*(name for _, name in socket.if_nameindex()), told["GLOO_SOCKET_IFNAME"], flush=True)

def take(senders):
    began, links = time.perf_counter(), [server.accept()[0] for _ in range(senders)]
    with ThreadPoolExecutor() as together:
        list(together.map(drain, links))
    print(time.perf_counter() - began, flush=True)

def drain(link):
    left = size
    while left:
        left -= len(link.recv(min(left, 65536)))

for line in sys.stdin:
    way, *numbers = line.split()
    if way == "take":
        take(int(numbers[0]))
    else:
        links = [socket.create_connection((f"10.0.0.{{int(number) + 1}}", 5000)) for number in numbers]
        for _ in range(10):
            for link in links:
                link.sendall(bytes(size // 10))
"""


@pytest.fixture
def links() -> Iterator[TbfLinks]:
    try:
        links = TbfLinks(3).__enter__()
    except OSError as error:
        pytest.skip(f"links by tc tbf: {error}")
    yield links
    links.__exit__()


def test_each_rank_sends_and_receives_at_its_own_rate(links: TbfLinks) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(links.enter.switch), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]

    def told(orders: dict[int, str]) -> None:
        for rank, order in orders.items():
            stdin = ranks[rank].stdin
            assert stdin is not None
            print(order, file=stdin, flush=True)

    def said(rank: int) -> str:
        stdout = ranks[rank].stdout
        assert stdout is not None
        return stdout.readline()

    try:
        assert [sorted(said(rank).split()) for rank in range(3)] == [["eth0", "eth0", "lo"]] * 3
        least = 0.9 * SIZE / SPEED  # load makes it longer alone
        with links.at(SPEED, [rank.pid for rank in ranks]):
            told({0: "take 2", 1: "give 0", 2: "give 0"})
            assert float(said(0)) >= 2 * least
            told({1: "take 1", 2: "take 1", 0: "give 1 2"})
            assert max(float(said(rank)) for rank in (1, 2)) >= 2 * least
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
