"""Changes to the ipyparallel controller. Its process makes them from the configuration file that `launch` writes.

`slow_down`: the heartbeat is frequent while engines arrive, and slow afterwards. ipyparallel registers an engine at a
heartbeat, so a short period makes a start quick. But a permanently short period costs a percent of a core, which ranks
of a small machine lack, and ipyparallel has one period for both. Hundreds of engines cannot be asked as often as two:
an answer that comes two periods late does not count, and the controller takes 0.07 ms of a core for each.

`end_with_schedulers`: a controller ends when one of its schedulers has ended. ipyparallel's own goes on: calls, output
or requests then reach nobody, and a waiter waits for ever. The parent of the ranks and each notebook see and report
that a controller has ended.

`hold_ports`: the controller's ports are kept from others between choosing and using them. ipyparallel asks the system
for a free port, closes it, and has a scheduler open it half a second later. Meanwhile any new connection on the machine
may get the port. The scheduler then dies, and a cluster without it does not answer.

`keep_none`: the controller's hub receives no copies of calls and output. ipyparallel's schedulers send the hub a copy
of everything that passes. The hub keeps records of it for `queue_status` and for looking up results; nbkit uses
neither. The copies took most of the controller's CPU time, and the records of a notebook that runs for weeks took all
memory.
"""

from __future__ import annotations

import socket
from typing import Any

CHECK_MS = 500


def end_with_schedulers() -> None:
    """Make the controller of this process end within half a second after one of the processes it started has ended."""
    from ipyparallel.controller.app import IPController
    from tornado.ioloop import PeriodicCallback

    ready = getattr(IPController, "init_signal", None)  # called when all of them have been started
    if ready is None:
        return  # see jupyter_private.py

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
    """Reserve the ports that the controller of this process chooses, as long as it lives.

    On Linux the system gives nobody a port on which a socket is bound, while another socket may listen on it if both
    have SO_REUSEADDR, as zmq's sockets do.
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
    """Make every Hub of this process and of its forks subscribe only to news of engines."""
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
    """Make every HeartMonitor of this process and its forks beat less often once engines have arrived, or are many."""
    from ipyparallel.controller.heartmonitor import HeartMonitor

    beat = getattr(HeartMonitor, "beat", None)
    if beat is None:
        return  # see jupyter_private.py

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
