"""What the controller's hub hears of calls and output: nothing.

ipyparallel's schedulers send the hub a copy of all that passes, of which it keeps records, for `queue_status` and for
looking results up. nbkit does neither. The copies took most of the controller's CPU, and the records of a notebook that
runs for weeks all memory. The controller's own process calls `keep_none` from the configuration file that `launch`
writes for it.
"""

from __future__ import annotations

from typing import Any

_HEARTS = b"heartmonitor"  # what hubs are sent besides: which engines have come, and which are gone


def keep_none() -> None:
    """Make every Hub of this process, and of those it forks, subscribe to nothing but news of engines."""
    from ipyparallel.controller.hub import Hub

    init = Hub.__init__

    def init_and_unsubscribe(hub: Any, **options: Any) -> None:
        init(hub, **options)
        hub.monitor.socket.subscribe(_HEARTS)
        hub.monitor.socket.unsubscribe(b"")  # schedulers then send no copies: publishers filter

    Hub.__init__ = init_and_unsubscribe
