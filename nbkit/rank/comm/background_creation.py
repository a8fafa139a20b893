"""Forms process groups, in a background thread if needed. Another thread can stop this before it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from nbkit.errors import ClusterError
from nbkit.rank.world import sockets


class Forming:
    """The state of the group that this process is forming. With it, another thread can break off the forming."""

    def __init__(self) -> None:
        self.broken = ""  # why no group can be formed until the next generation
        self.deadline: float | None = None  # seconds of time.monotonic; None waits forever, as user code expects
        self.before: frozenset[int] | None = None  # sockets held when the current forming began
        self.lock = threading.Lock()
        self._maker: threading.Thread | None = None
        self._own = threading.local()  # the deadline of the maker

    def beside(self, make: Callable[[], None], *, seconds: float) -> threading.Thread:
        """Run `make`, which forms groups, in a thread for at most `seconds`.

        All ranks must form groups in the same order, so all must call this at the same place. Other code that forms a
        group waits until the thread has ended.
        """

        def run() -> None:
            self._own.deadline = time.monotonic() + seconds
            make()

        self.join()
        self._maker = threading.Thread(target=run, name="nbkit-groups", daemon=True)
        self._maker.start()
        return self._maker

    def join(self) -> None:
        """Wait for the background thread. In that thread itself, do nothing."""
        if self._maker is not None and self._maker is not threading.current_thread():
            self._maker.join()

    def stop(self, why: str) -> None:
        """Break off the forming in the background thread, and wait until the thread has ended."""
        if self._maker is None or not self._maker.is_alive():
            return
        before, self.broken = self.broken, self.broken or why
        sockets.shut(self.young())
        self.join()
        self.broken = before

    def young(self) -> frozenset[int]:
        """Return the inodes of the sockets of the group that is being formed."""
        with self.lock:
            return sockets.inodes() - self.before if self.before is not None else frozenset()

    def too_late(self) -> bool:
        """Return True if the deadline of this thread has passed."""
        deadline = getattr(self._own, "deadline", self.deadline)
        return deadline is not None and time.monotonic() > deadline


forming = Forming()


BROKEN_OFF = "The formation of a process group was interrupted."


class GroupRendezvous:
    """A place where the members of a group wait for each other, in Python, so that another thread can end the wait.

    Each of the `size` members comes once to every `place`. A place is, for example, the forming of the group or the
    first use of a communicator.
    """

    def __init__(self, store: Store) -> None:
        self._store = BreakableStore(store)
        self.been: set[str] = set()

    def at(self, place: str, size: int) -> None:
        """Wait until all members have come to `place`. Raises ClusterError if the wait is broken off or too long."""
        if place in self.been or size == 1:
            return
        if self._store.add(f"{place}/come", 1) == size:
            self._store.set(f"{place}/all", "here")
        self._store.wait([f"{place}/all"])
        self.been.add(place)


class BreakableStore(Store):
    """A store whose waits can be ended by another thread, by Ctrl-C, or by our deadline.

    gloo's ranks find each other through the store when they form a group. If gloo waited in C++, a rank whose peer
    never comes could not be released. gloo also has a single time-out for the forming and for all later operations.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys` in one request. All keys must exist."""
        return self.inner.multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pause = 0.0005
        while not self.inner.check(keys):
            if forming.broken:
                raise ClusterError(BROKEN_OFF, numbers=forming.broken)
            if forming.too_late():
                raise ClusterError("A process group could not be formed in time.", numbers=f"waiting for {keys}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)
