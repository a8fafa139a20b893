"""What the controller remembers of calls that are answered: a bounded number of their ids.

ipyparallel's hub keeps the id of every answered call, three times, for `queue_status` and for looking results up, which
nbkit does not do: in a notebook that runs for weeks, or a program that runs cells in a loop, they would take all
memory. The controller's own process calls `bound` from the configuration file that `launch` writes for it.
"""

from __future__ import annotations

from typing import Any

CALLS_KEPT = 1000


def bound() -> None:
    """Make every Hub of this process, and of those it forks, forget the calls that are answered, 1,000 at a time."""
    from ipyparallel.controller.hub import Hub

    save = Hub.save_queue_result

    def save_and_forget(hub: Any, *reply: Any) -> None:
        save(hub, *reply)
        if len(hub.all_completed) >= CALLS_KEPT:
            hub.all_completed.clear()
            for calls in hub.completed.values():
                calls.clear()

    Hub.save_queue_result = save_and_forget
