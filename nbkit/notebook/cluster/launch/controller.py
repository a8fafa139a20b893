"""Changes to the ipyparallel controller. The configuration file that `launch` writes calls them in its process.

`slow_down`: make heartbeats frequent while engines register, and slow afterwards. ipyparallel registers an engine at a
heartbeat, so a short period makes a start quick. But a permanently short period costs a percent of a core, which a
small machine needs for its ranks, and ipyparallel has only one period. With hundreds of engines the period must be
longer: an answer that comes two periods late is lost, and each costs the controller 0.07 ms of CPU time.

`end_with_schedulers`: end a controller when one of its schedulers has ended. Otherwise calls, output or requests reach
nobody, and callers wait for ever. The parent of the ranks and each notebook notice and report the end of a controller.

`hold_ports`: reserve the controller's ports until they are used. ipyparallel asks the system for a free port, closes
it, and lets a scheduler open it half a second later. Meanwhile any new connection on the machine may get the port. The
scheduler then dies, and the cluster does not answer.

`keep_none`: send the controller's hub no copies of calls and output. ipyparallel's schedulers send the hub a copy of
every message, and the hub records them for `queue_status` and to look up results. nbkit uses neither. The copies took
most of the controller's CPU time, and the records filled the memory when a notebook ran for weeks.
"""

from __future__ import annotations

import socket
from typing import Any

CHECK_MS = 500


def end_with_schedulers() -> None:
    """Make the controller of this process end within half a second after one of its child processes has ended."""
    from ipyparallel.controller.app import IPController
    from tornado.ioloop import PeriodicCallback

    ready = getattr(IPController, "init_signal", None)  # called when all schedulers have been started
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
    """Reserve the ports that the controller of this process chooses, as long as the process lives.

    Linux does not give a port away while a socket is bound to it. But another socket can still listen on it if both
    have SO_REUSEADDR, as zmq's sockets have.
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


_HEARTS = b"heartmonitor"  # messages about engines that have registered or left


def keep_none() -> None:
    """Make every Hub of this process and of its forks subscribe only to news of engines."""
    from ipyparallel.controller.hub import Hub

    init = Hub.__init__

    def init_and_unsubscribe(hub: Any, **options: Any) -> None:
        init(hub, **options)
        hub.monitor.socket.subscribe(_HEARTS)
        hub.monitor.socket.unsubscribe(b"")  # publishers filter, so schedulers then send no copies

    Hub.__init__ = init_and_unsubscribe


FAST_MS = 50
SLOW_MS = 1000
MS_PER_ENGINE = 2  # so that the answers cost the controller at most 3 to 4 % of a core
QUIET_SECONDS = 5.0  # without a new engine, after the first one
GIVEN_UP_SECONDS = 300.0  # long, because an engine that the hub has given up never comes back


def slow_down() -> None:
    """Make every HeartMonitor of this process and its forks slower when engines have registered, or are many."""
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
