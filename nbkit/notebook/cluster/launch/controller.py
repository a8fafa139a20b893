"""The controller's heartbeat: it asks the engines for a sign of life often while they arrive, seldom afterwards.

ipyparallel registers an engine at a heartbeat, so a short period is a quick start; but a short period for ever is a
percent of a core, taken from the ranks of a machine that has few. ipyparallel has one period for both. Nor may hundreds
of engines be asked as often as two: an answer that comes two periods late does not count, and the controller takes 0.07
ms of a core for each. The controller's own process calls `slow_down` from the configuration file that `launch` writes.

A controller ends when one of its schedulers has.

ipyparallel's goes on: calls, output or requests then reach nobody, and whoever waits for an answer waits for ever. That
a controller has ended is seen and told by the parent of the ranks and by each notebook. The controller's own process
calls `end_with_schedulers` from the configuration file that `launch` writes for it.

The controller's ports, kept from others between choosing and using them.

ipyparallel asks the system for a free port, closes it, and has a scheduler open it half a second later. Meanwhile any
connection that begins on the machine may get it; the scheduler then dies, and a cluster without it does not answer. The
controller's own process calls `hold_ports` from the configuration file that `launch` writes.

What the controller's hub hears of calls and output: nothing.

ipyparallel's schedulers send the hub a copy of all that passes, of which it keeps records, for `queue_status` and for
looking results up. nbkit does neither. The copies took most of the controller's CPU, and the records of a notebook that
runs for weeks all memory. The controller's own process calls `keep_none` from the configuration file that `launch`
writes for it.
"""

from __future__ import annotations

import socket
from typing import Any

CHECK_MS = 500


def end_with_schedulers() -> None:
    """Make the controller of this process end, within half a second, when one of the processes that it started has."""
    from ipyparallel.controller.app import IPController
    from tornado.ioloop import PeriodicCallback

    ready = getattr(IPController, "init_signal", None)  # called when all of them have been started
    if ready is None:
        return  # see ipyparallel_private.py

    def ready_and_watching(controller: Any) -> None:
        ready(controller)
        PeriodicCallback(lambda: _check(controller), CHECK_MS).start()

    IPController.init_signal = ready_and_watching


def _check(controller: Any) -> None:
    for child in (*controller.children, controller.heartmonitor_process):
        process = getattr(child, "launcher", child)
        if not process.is_alive():
            name = getattr(child, "name", process.name)
            controller.log.critical(f"{name} ended (exit code {process.exitcode}), and so does the controller.")
            controller.terminate_children()
            controller.loop.stop()
            return


_held: list[socket.socket] = []


def hold_ports() -> None:
    """Have the ports that the controller of this process chooses belong to it as long as it lives.

    On Linux the system gives nobody a port on which a socket is bound, while another socket may listen on it if both
    have SO_REUSEADDR, as those of zmq have.
    """
    from ipyparallel import util

    util.select_random_ports = _chosen


def _chosen(number: int) -> list[int]:
    ports = []
    for _ in range(number):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        _held.append(holder)
        ports.append(holder.getsockname()[1])
    return ports


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


FAST_MS = 50
SLOW_MS = 1000
MS_PER_ENGINE = 2  # so that the answers take the controller 3 to 4 % of a core at most
QUIET_SECONDS = 5.0  # without a new engine, after the first one
GIVEN_UP_SECONDS = 300.0  # an engine that the hub gives up never comes back, so it is slow to


def slow_down() -> None:
    """Make every HeartMonitor of this process and its forks beat less often where engines have arrived, or are many."""
    from ipyparallel.controller.heartmonitor import HeartMonitor

    beat = getattr(HeartMonitor, "beat", None)
    if beat is None:
        return  # see ipyparallel_private.py

    def beat_and_adjust(monitor: Any) -> None:
        known = len(monitor.hearts)
        beat(monitor)
        if not monitor.hearts or len(monitor.hearts) > known:
            monitor.last_arrival = monitor.lifetime
        quiet = monitor.lifetime - monitor.last_arrival > QUIET_SECONDS
        period = max(SLOW_MS if quiet else FAST_MS, MS_PER_ENGINE * len(monitor.hearts))
        monitor.caller.callback_time = period
        monitor.max_heartmonitor_misses = int(GIVEN_UP_SECONDS * 1000 / period)

    HeartMonitor.beat = beat_and_adjust
