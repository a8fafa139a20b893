"""Find the rank on which a run failed, as far as this rank can know it."""

from __future__ import annotations

import re
import time

from nbkit.errors import NbkitError, NotFinite
from nbkit.rank.world import world
from nbkit.records.events import Failed
from nbkit.wire.text_encoding import encodable

PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "pair closure", "remote process exited", "was aborted")
"""Parts of error messages that a rank gets if a peer ends while it waits. Such an error is never the root cause."""

_NEWS_SECONDS = 0.3  # a rank may get such an error a moment before it is told about the end of the peer


def failure_of(error: BaseException, *, step: int) -> Failed | None:
    """Return the event for the error that ended a run after `step` steps; None if the user stopped the run."""
    if isinstance(error, NotFinite):
        return Failed(step, rank=error.rank, error="NotFinite", what=error.what)
    here = world.current()
    lost = any(sign in str(error) for sign in PEER_GONE)
    deadline = time.monotonic() + (_NEWS_SECONDS if lost else 0.0)
    while here is not None and not here.dirty and time.monotonic() < deadline:
        time.sleep(0.01)
    why = here.dirty if here is not None else ""
    if named := re.match(r"rank (\d+) ", why):
        return Failed(step, rank=int(named[1]), what=why)
    if why or isinstance(error, KeyboardInterrupt):
        return None
    what = encodable(error.what if isinstance(error, NbkitError) else str(error).partition("\n")[0])
    own = here.place.rank if here is not None and not lost else None
    return Failed(step, rank=own, error=type(error).__name__, what=what)
