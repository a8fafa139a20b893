"""A controller ends when one of its schedulers has.

ipyparallel's goes on: calls, output or requests then reach nobody, and whoever waits for an answer waits for ever. That
a controller has ended is seen and told by the parent of the ranks and by each notebook. The controller's own process
calls `end_with_schedulers` from the configuration file that `launch` writes for it.
"""

from __future__ import annotations

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
