"""Test that a link between hosts accepts what the other end sent, in order, and nothing else."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import InUse, Listen, Listening, Message, encoded

Pair = tuple[SignedLink[Message, Message], SignedLink[Message, Message]]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as opened:
        accepted, _ = server.accept()
        with accepted:
            yield opened, accepted


def linked(ends: tuple[socket.socket, socket.socket], key: str, other: str) -> Pair:
    return SignedLink(ends[0], key, opened=True), SignedLink(ends[1], other, opened=False)


def test_messages_go_both_ways_and_a_successor_continues_the_link(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, coordinator = linked(ends, "k", "k")
    agent.send(Listening("a", 1))
    assert coordinator.receive() == [Listening("a", 1)]
    coordinator.send(Listen())
    assert agent.receive() == [Listen()]
    parent: SignedLink[Message, Message] = SignedLink(
        ends[0], "k", opened=True, sent=agent.sent, received=agent.received
    )
    parent.send(InUse())
    assert coordinator.receive() == [InUse()]


def test_messages_signed_with_a_wrong_key_are_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    stranger, coordinator = linked(ends, key_of("guessed", "nonce"), key_of("secret", "nonce"))
    stranger.send(Listen())
    assert coordinator.receive() is None and coordinator.refused is None


def test_a_message_of_another_release_is_refused_with_all_after_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, coordinator = linked(ends, "k", "k")
    of_another = json.dumps({**encoded(InUse()), "_protocol": "another"}).encode()
    ends[0].sendall(agent._packed(of_another) + b"\n")
    agent.send(InUse())
    assert coordinator.receive() is None
    assert coordinator.refused is not None and "protocol another" in coordinator.refused.numbers


@pytest.mark.parametrize("trick", ["again", "back"])
def test_a_replayed_or_reflected_message_is_refused(ends: tuple[socket.socket, socket.socket], trick: str) -> None:
    agent, coordinator = linked(ends, "k", "k")
    seen = agent._packed(json.dumps(encoded(InUse())).encode()) + b"\n"
    if trick == "again":
        ends[0].sendall(seen)
        assert coordinator.receive() == [InUse()]
        ends[0].sendall(seen)
        assert coordinator.receive() is None
    else:
        ends[1].sendall(seen)
        assert agent.receive() is None


@pytest.mark.parametrize(("linger", "broke"), [((0, 0), False), ((1, 0), True)], ids=["closed", "given up"])
def test_a_reset_link_is_distinguished_from_a_closed_one(
    ends: tuple[socket.socket, socket.socket], linger: tuple[int, int], broke: bool
) -> None:
    parent, _ = linked(ends, "k", "k")
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
    ends[1].close()
    assert parent.receive() is None and parent.broke is broke
