"""The client of a cluster: sends calls and requests to ranks, and receives everything that comes back.

This is the only file that uses private parts of ipyparallel's Client. The reasons:

- Its iopub handler drops messages that belong to an earlier kernel, collects all text of a cell in one growing string,
  and shows an engine's widgets in the cell that the kernel ran last.
- Its public control requests are a fixed list.
- Its apply packs the function once per engine, keeps five records of each call, wakes its thread for each, and parses
  the times in each reply. This takes half of a call's CPU time.
- It sends on raw sockets. zmq's file descriptors are edge-triggered and a send consumes the edge, so the sockets'
  streams may miss that a reply has come, and that reply is never read. Here everything is sent through the streams.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import wait as settle
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel import serialize

from nbkit.errors import ClusterError
from nbkit.wire.cells import COMM_TYPES, SIGNATURES_KEPT, Remote
from nbkit.wire.messages import NEWS, REQUEST, Hello, Request, SayHello, StopCall, decoded, encoded

HELLO_SECONDS, HELLO_SECONDS_PER_RANK = 0.3, 0.002  # until a greeting counts as lost
STOPPED_SECONDS = 3.0  # time for a stopped call to end
Listener = Callable[[str, dict[str, Any], dict[str, Any]], None]  # (message type, mark, content)


class _IPClient(ipyparallel.Client):  # type: ignore[misc]
    """ipyparallel's client, with nbkit's own messages removed from its stream."""

    def __init__(self, client_file: str, timeout: float) -> None:
        self.listener: Listener | None = None
        self._calls: dict[str, tuple[str, Future[Any]]] = {}  # message id -> (engine, future of the reply)
        super().__init__(client_file, timeout=timeout)
        self.session.digest_history_size = SIGNATURES_KEPT

    def _dispatch_iopub(self, frames: list[Any]) -> None:
        try:
            self._hand_on(frames)
        except Exception:
            # If the error reached zmq, no later message of this session would be handled.
            traceback.print_exc(file=sys.__stderr__)

    def _hand_on(self, frames: list[Any]) -> None:
        _, parts = self.session.feed_identities(frames, copy=False)
        message = self.session.deserialize(parts, content=True, copy=False)
        kind, content, mark = message["msg_type"], message["content"], message["metadata"].pop("nbkit", None)
        if mark is None or self.listener is None:
            return  # a message of ipykernel itself; nobody waits for it
        if kind in COMM_TYPES:
            buffers = [bytes(buffer) for buffer in message["buffers"]]
            content = {**content, "metadata": message["metadata"], "buffers": buffers}
        self.listener(kind, mark, content)

    def call_engines(self, engines: Sequence[str], packed: list[bytes]) -> list[Future[Any]]:
        """Send one packed call to each engine. Return each result, or the error as a value."""
        answers: list[Future[Any]] = [Future() for _ in engines]
        calls = []
        for engine, answer in zip(engines, answers, strict=True):
            message = self.session.msg("apply_request", metadata={"nbkit": "call"})
            self._calls[message["msg_id"]] = engine, answer
            calls.append((engine, message, answer))
        self._io_loop.add_callback(self._send_calls, calls, packed)
        return answers

    def _send_calls(self, calls: list[tuple[str, dict[str, Any], Future[Any]]], packed: list[bytes]) -> None:
        for engine, message, answer in calls:
            try:
                self.session.send(self._mux_stream, message, buffers=packed, ident=engine.encode())
            except Exception as error:
                self._calls.pop(message["msg_id"], None)
                answer.set_exception(error)

    def _handle_apply_reply(self, message: dict[str, Any]) -> None:
        """Handle the reply to one of `call_engines`, as ipyparallel's own method does for its calls."""
        _, answer = self._calls.pop(message["parent_header"].get("msg_id"), ("", None))
        if answer is None:  # its engine was already reported dead
            return
        try:
            if message["content"]["status"] == "ok":
                result = serialize.deserialize_object(message["buffers"])[0]
            else:
                result = self._unwrap_exception(message["content"])
        except Exception as error:  # an unreadable reply must still end the wait
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _handle_stranded_msgs(self, rank: int, engine: str) -> None:
        """Answer the requests to an engine that is gone."""
        for message, (asked, answer) in list(self._calls.items()):
            if asked == engine:
                del self._calls[message]
                answer.set_result(ipyparallel.error.EngineError(f"Rank {rank} died while running {message}"))


class Client:
    """A client of the cluster that `client_file` describes. It has its own thread, "the client's thread"."""

    def __init__(self, client_file: Path) -> None:
        self.ipp = _IPClient(str(client_file), timeout=30)
        self.heard: set[int] = set()
        self._listener: Listener | None = None
        self.ipp.listener = self._on_message

    def listen(self, listener: Listener, on_gone: Callable[[int], None]) -> None:
        """Pass on everything that arrives from now on.

        listener: called on the client's thread for each of nbkit's messages from any rank.
        on_gone: called on that thread with a rank whose engine has left the hub.
        """
        self._listener = listener
        self.ipp._registration_callbacks.append(
            lambda event: on_gone(int(event["id"])) if event["event"] == "unregister" else None
        )

    def _on_message(self, kind: str, mark: dict[str, Any], content: dict[str, Any]) -> None:
        if kind == NEWS and isinstance(decoded(content), Hello):
            self.heard.add(mark["rank"])
        elif self._listener is not None:
            self._listener(kind, mark, content)

    @property
    def ranks(self) -> list[int]:
        return list(self.ipp.ids)

    def wait_for(self, n: int, timeout: float) -> bool:
        """Return True if `n` ranks have registered within `timeout` seconds. If not, ask the hub which ones it has.

        The hub tells a new client which ranks it has, and publishes those that register later. A rank may register
        after the hub has answered the client, but before the client's subscription has reached the hub. The client then
        learns of it neither way, and this query finds it for the next `wait_for`.
        """
        arrived = self.ipp.wait_for_engines(n, block=False, timeout=timeout, interactive=False)
        if arrived is None or _settled(arrived, timeout):
            return True
        asked = self.ipp._send(self.ipp._query_stream, "connection_request")
        asked.add_done_callback(lambda reply: self.ipp._update_engines(reply.result()["content"]["engines"]))
        return False

    def reach(self, ranks: Iterable[int], timeout: float, is_worth_it: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Wait until calls, requests and messages reach each rank and come back. Return what each rank reports.

        A rank's three channels connect independently, and zmq drops messages to or from a peer that has not connected
        yet. So this repeats its greeting until each rank has answered on all channels, `is_worth_it` returns False, or
        `timeout` seconds have passed. Ranks that stay silent are left out.
        """
        wanted = set(ranks)
        answers: dict[int, dict[str, Any]] = {}
        asked: list[tuple[int, Future[Any]]] = []
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and is_worth_it():
            calls = self.call(wanted - set(answers), "nbkit.bridge.calls:hello")
            requests = self.request(wanted - self.heard, SayHello())
            settle([*calls.values(), *requests.values()], HELLO_SECONDS + HELLO_SECONDS_PER_RANK * len(wanted))
            asked += calls.items()  # late replies count too
            answers.update({rank: call.result() for rank, call in asked if call.done() and not call.exception()})
            asked = [(rank, call) for rank, call in asked if not call.done()]
            if wanted <= set(answers) and self._hears(wanted):
                break
        return {rank: answer for rank, answer in answers.items() if rank in self.heard}

    def listen_to(self, ranks: Iterable[int], timeout: float) -> None:
        """Wait until the ranks' messages arrive here. Unlike `reach`, this also works while the ranks are busy."""
        wanted, deadline = set(ranks), time.monotonic() + timeout
        while not wanted <= self.heard and time.monotonic() < deadline:
            self.request(wanted - self.heard, SayHello())
            self._hears(wanted)

    def _hears(self, ranks: set[int]) -> bool:
        deadline = time.monotonic() + HELLO_SECONDS + HELLO_SECONDS_PER_RANK * len(ranks)
        while not ranks <= self.heard and time.monotonic() < deadline:
            time.sleep(0.001)
        return ranks <= self.heard

    def call(self, ranks: Iterable[int], target: str, *args: Any) -> dict[int, Future[Any]]:
        """Call `module:function` in the main thread of each rank, after its current work."""
        packed = serialize.pack_apply_message(Remote(target), args, {})
        futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        here = [(rank, engine) for rank in futures if (engine := self.ipp._engines.get(rank)) is not None]
        futures |= zip(
            (rank for rank, _ in here), self.ipp.call_engines([each for _, each in here], packed), strict=True
        )
        for rank in futures.keys() - {rank for rank, _ in here}:
            futures[rank].set_exception(ClusterError(f"Rank {rank} has left the cluster."))
        return futures

    def relay(self, rank: int, kind: str, content: dict[str, Any], metadata: Any, buffers: Any) -> None:
        """Send a page's comm message to the rank where the widget lives. The rank handles it between two cells."""
        if (engine := self.ipp._engines.get(rank)) is not None:
            self.ipp._send(
                self.ipp._mux_stream,
                kind,
                content=content,
                metadata=metadata,
                buffers=buffers,
                ident=engine.encode(),
            )

    def request(self, ranks: Iterable[int], request: Request) -> dict[int, Future[Any]]:
        """Send a request to each rank. A rank answers it at once, even while it runs a cell.

        Return a future of the whole reply message for each rank.
        """
        known, content = set(self.ipp.ids), encoded(request)
        return {
            rank: self.ipp._send(
                self.ipp._control_stream,
                REQUEST,
                content=content,
                ident=self.ipp._engines[rank].encode(),
            )
            for rank in ranks
            if rank in known
        }

    def call_and_wait(self, ranks: Iterable[int], target: str, *args: Any, timeout: float = 600.0) -> dict[int, Any]:
        """Make a `call` and return what each rank returned. Raises the error of a rank, or TimeoutError.

        After an error, the ranks that still work on the call are told to stop it. Otherwise the next cell would wait
        behind it.
        """
        futures = self.call(ranks, target, *args)
        try:
            for future in as_completed(futures.values(), timeout):
                if isinstance(result := future.result(), ipyparallel.error.IPythonError):
                    raise result  # the client returns errors as results
        except BaseException:
            if left := [rank for rank, future in futures.items() if not future.done()]:
                self.request(left, StopCall())
                settle([futures[rank] for rank in left], STOPPED_SECONDS)
            raise
        return {rank: future.result() for rank, future in futures.items()}

    def ask(self, ranks: Iterable[int], request: Request, timeout: float = 2.0) -> dict[int, dict[str, Any]]:
        """Send a `request` and return the replies' contents, without ranks that do not answer in `timeout` seconds."""
        futures = self.request(ranks, request)
        deadline = time.monotonic() + timeout
        answers = {}
        for rank, future in futures.items():
            try:
                content = dict(future.result(max(0.01, deadline - time.monotonic()))["content"])
            except TimeoutError:
                continue
            if content["status"] == "ok":
                answers[rank] = content
        return answers

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Run on the client's thread."""
        self.ipp._io_loop.add_callback(function, *args)

    def later(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """Run on the client's thread after `seconds`. Call it from that thread only."""
        return self.ipp._io_loop.call_later(seconds, function, *args)

    def close(self) -> None:
        self.ipp.close(linger=0)


def _settled(future: Future[Any], timeout: float) -> bool:
    try:
        future.result(timeout)
    except Exception:
        return False
    return True
