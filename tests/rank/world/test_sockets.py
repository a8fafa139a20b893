"""Test that only the chosen connections are shut, even while other threads open and close some."""

from __future__ import annotations

import os
import socket

import pytest

from nbkit.rank.world import sockets


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


def test_only_connections_of_the_given_inodes_are_shut() -> None:
    (old, peer), (other, friend) = connection(), connection()
    assert sockets.shut({os.fstat(old.fileno()).st_ino}) == 1
    assert peer.recv(1) == b""
    other.sendall(b"x")
    assert friend.recv(1) == b"x"
    for each in (old, peer, other, friend):
        each.close()


def test_a_new_connection_that_reuses_a_closed_number_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    (old, peer), (new, friend) = connection(), connection()
    number, dup = old.fileno(), os.dup
    inode = os.fstat(number).st_ino

    def meanwhile(fd: int) -> int:
        """Reuse the number, as two threads of gloo may: one closes a connection while another opens one."""
        if fd == number:
            os.dup2(new.fileno(), number)
        return dup(fd)

    monkeypatch.setattr(sockets.os, "dup", meanwhile)
    assert sockets.shut({inode}) == 0
    new.sendall(b"x")
    assert friend.recv(1) == b"x"
    for each in (old, peer, new, friend):
        each.close()
