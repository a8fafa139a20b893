"""The comms of widgets that live on ranks, in the notebook's kernel. A page's message is forwarded to the rank.

Messages from a widget to its pages arrive in order with the outputs of its cell; see display.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nbkit.notebook.cluster.registry import notebook_shell

TARGET = "nbkit.rank"  # a name of our own, so that no page asks for a widget's state: its rank may be busy

Relay = Callable[[int, str, dict[str, Any], Any, Any], None]  # (rank, message type, content, metadata, buffers)


class ClusterComms:
    """The comms of one cluster's ranks. relay: sends a message to a rank, on the thread that received the message."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._open: set[str] = set()

    def on_message(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """Handle a comm message of a rank: record a comm that it opens or closes."""
        manager = _manager()
        if manager is None or kind == "comm_msg":
            return
        comm = content["comm_id"]
        if kind == "comm_open":
            self._open.add(comm)
            manager.register_comm(_on_a_rank(comm, partial(self._relay, rank)))
        else:
            self._open.discard(comm)
            manager.comms.pop(comm, None)

    def close(self) -> None:
        """Close all comms, because the ranks have ended or belong to another notebook."""
        manager = _manager()
        while self._open and manager is not None:
            manager.comms.pop(self._open.pop(), None)


def _manager() -> Any:
    """Return the kernel's comm manager, or None without a kernel."""
    return getattr(getattr(notebook_shell(), "kernel", None), "comm_manager", None)


def _on_a_rank(comm: str, send: Callable[..., None]) -> Any:
    """Return a comm for the kernel that forwards the page's messages to the rank and sends nothing to the page."""
    from comm.base_comm import BaseComm

    class OnARank(BaseComm):
        def publish_msg(self, *args: Any, **options: Any) -> None:
            return

        def handle_msg(self, msg: Any) -> None:
            send(msg["header"]["msg_type"], msg["content"], msg.get("metadata"), msg.get("buffers"))

        handle_close = handle_msg

    return OnARank(target_name=TARGET, comm_id=comm, primary=False)
