"""Test links by `tc tbf` between namespaces: each rank sends and receives at its own rate, not faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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


LEAST = 0.9 * SIZE / SPEED
"""The least seconds for one message. Load can only make it longer."""

Ask = Callable[[dict[int, str]], dict[int, float]]


@contextmanager
def asked(ranks: int, node: int) -> Iterator[Ask]:
    """Yield a function that sends orders to ranks on rate-limited links. Receivers answer with the seconds."""
    with ExitStack() as stack:
        try:
            links = stack.enter_context(TbfLinks(ranks, node=node))
        except OSError as error:
            pytest.skip(f"links by tc tbf: {error}")
        seats = []
        for rank in range(ranks):
            command = [sys.executable, "-c", RANK, str(links.enter.switch), str(rank)]
            seats.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(seats[-1].wait)
            stack.callback(seats[-1].kill)
        for seat in seats:
            assert sorted(_line(seat).split()) == ["eth0", "eth0", "lo"]
        stack.enter_context(links.at(SPEED, [seat.pid for seat in seats]))

        def ask(orders: dict[int, str]) -> dict[int, float]:
            for rank, order in orders.items():
                print(order, file=seats[rank].stdin, flush=True)
            return {rank: float(_line(seats[rank])) for rank, order in orders.items() if order.startswith("take")}

        yield ask


def _line(seat: subprocess.Popen[str]) -> str:
    assert seat.stdout is not None
    return seat.stdout.readline()


def test_each_rank_sends_and_receives_at_its_own_rate() -> None:
    with asked(3, node=1) as ask:
        assert ask({0: "take 2", 1: "give 0", 2: "give 0"})[0] >= 2 * LEAST
        assert max(ask({1: "take 1", 2: "take 1", 0: "give 1 2"}).values()) >= 2 * LEAST


def test_ranks_of_a_node_share_its_link_to_the_others() -> None:
    with asked(4, node=2) as ask:
        assert max(ask({2: "take 1", 3: "take 1", 0: "give 2", 1: "give 3"}).values()) >= 2 * LEAST
