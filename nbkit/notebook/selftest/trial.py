"""Items of a selftest, one after the other on one cluster; nothing of it outlives the `with`."""

from __future__ import annotations

import io
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from nbkit.errors import CellError, CellStopped, NbkitError
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.selftest.items import SETUP, Failed, Item, Left, Place
from nbkit.notebook.selftest.report import Outcome, tail_of
from nbkit.notebook.uninterrupted import uninterrupted

# Ranks that outlive a killed selftest let go of their devices after this.
TTL_SECONDS = 60
_DEVICES = """
name, nccl = ("CPU", "") if device.type == "cpu" else (torch.cuda.get_device_name(), str(torch.cuda.nccl.version()))
f"{name}, {dist.get_backend()} {nccl}, {torch.get_num_threads()} threads"
"""


class Trial:
    """`with Trial(4, kind="cpu") as trial: trial.outcome(item)`. What cells print is kept for the report alone."""

    def __init__(self, n: int, *, kind: str) -> None:
        """kind: "cpu" or "gpu"."""
        self._n, self._kind = n, kind

    def __enter__(self) -> Trial:
        self._folder = tempfile.TemporaryDirectory(prefix="nbkit-selftest-", ignore_cleanup_errors=True)
        try:
            with _kept():
                self._cluster = Cluster.start(self._n, cpu=self._kind == "cpu", ttl=TTL_SECONDS)
        except BaseException:
            self._folder.cleanup()
            raise
        self._place = Place(self._cluster, self._kind, Path(self._folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            with _kept():
                self._cluster.stop()
            self._folder.cleanup()

    def devices(self) -> str:
        """What each rank computes on."""
        with _kept():
            values = self._place.cell(_DEVICES).values
        return "\n".join(f"rank {rank}  {said}" for rank, said in values.items())

    def outcome(self, item: Item) -> Outcome:
        """Try it. After a failure the ranks are new ones."""
        began = time.monotonic()
        with _kept() as printed:
            try:
                self._place.cell(SETUP)
                found = item.try_it(self._place)
                return Outcome(item.name, "ok", time.monotonic() - began, found)
            except Left as why:
                return Outcome(item.name, "left out", 0.0, str(why))
            except CellStopped:
                raise
            except Exception as error:
                took, said = time.monotonic() - began, _said(error)
                tail = "\n\n".join([tail_of(printed.getvalue()), said, *self._stuck(error)])
                self._cluster.restart()
                return Outcome(item.name, "FAILED", took, said, tail)

    def _stuck(self, error: Exception) -> Iterator[str]:
        """Who is stuck where, of a cell that did not end."""
        if isinstance(error, TimeoutError):
            yield tail_of(str(self._cluster.why()))


def _said(error: Exception) -> str:
    if isinstance(error, CellError):
        return tail_of(f"{error}\n{error.traceback}")
    if isinstance(error, NbkitError | Failed | TimeoutError):
        return str(error)
    return tail_of("".join(traceback.format_exception(error)))


@contextmanager
def _kept() -> Iterator[io.StringIO]:
    """What is printed inside, on whatever thread, goes into the value."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        yield printed
