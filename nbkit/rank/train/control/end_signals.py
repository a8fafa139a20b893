"""In a job that goes on later: a signal that the job ends soon lets a training be saved at its next boundary, and end.

For scripts under torchrun. On the ranks of a cluster the bridge hears these signals, from the start on.
"""

from __future__ import annotations

import signal
import threading

from nbkit.rank.train.control import step_boundary
from nbkit.wire.cluster_end import end_signals


def heed_end_signals() -> None:
    """Hear them from now on, where nobody else does. A training begins."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in end_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, lambda number, _: step_boundary.tell_to_end(f"the job ends soon ({_name(number)})"))


def _name(number: int) -> str:
    return signal.Signals(number).name
