"""Start a cluster on other hosts from the notebook, with a controller and a coordinator here. All or nothing.

As on one machine, the returned cluster has a world. First each rank registers with its own id. Then rank 0 listens at
its host's address, and all ranks form the world there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from ipyparallel.cluster.launcher import LocalProcessLauncher

from nbkit.errors import ClusterError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.launcher import LauncherDriver, StartRequest, saved
from nbkit.notebook.cluster.hosts.progress import StartProgress
from nbkit.notebook.cluster.launch.launch import (
    START_SECONDS,
    connect,
    controller_launcher,
    end,
    environment_of_ranks,
    failed,
    make_folder,
    quiet,
    with_ranks,
)
from nbkit.notebook.cluster.output.root_cause import deaths_in
from nbkit.notebook.cluster.registry import DETACHED, ClusterEntry
from nbkit.notebook.cluster.world_generation import form
from nbkit.notebook.user_files import uninterrupted
from nbkit.wire.cells import ranks_named
from nbkit.wire.messages import GetStatus
from nbkit.wire.processes import Process
from nbkit.wire.user_code import OWN_MODULES

_LINE_SECONDS = 0.1  # between two updates of the progress line
_REGISTER_SECONDS = 60.0  # from the fork of the ranks


class CoordinatorLauncher(LocalProcessLauncher):  # type: ignore[misc]
    """ipyparallel's launcher for the coordinator, the process that starts the agents on the hosts."""

    def find_args(self) -> list[str]:
        module = "nbkit.notebook.cluster.hosts.coordinator"
        return [sys.executable, *OWN_MODULES, module, str(Path(self.profile_dir).parent)]


def launch_on_hosts(
    name: str, request: StartRequest, ttl: float, options: dict[str, object]
) -> tuple[ClusterEntry, Client, tuple[str, ...]]:
    """Start cluster `name`. Return its entry, a client, and notes for the user. Wait while the job is in a queue.

    Raises ClusterExists, UsageError for a request that can never fit, or ClusterError. Then nothing is left on any
    host.
    """
    with _all_or_nothing(name, request) as begin:
        return reach_on_hosts(begin(ttl, options))


def submit_to_hosts(name: str, request: StartRequest, ttl: float, options: dict[str, object]) -> ClusterEntry:
    """Request the hosts of cluster `name`. Return as soon as the launcher has requested them, without its ranks.

    If the request is refused at once, raise like `launch_on_hosts`.
    """
    with _all_or_nothing(name, request) as begin:
        entry = begin(ttl, {**options, DETACHED: True})
        while _check(entry) is None:
            _check_processes(entry)
            time.sleep(_LINE_SECONDS)
        return entry


def reach_on_hosts(entry: ClusterEntry) -> tuple[ClusterEntry, Client, tuple[str, ...]]:
    """Wait until the ranks of a starting cluster have a world, and register them.

    Return the entry, a client, and notes for the user. Raises ClusterError.
    """
    client, line = None, LiveLine()
    try:
        client = _connected(entry, time.monotonic() + START_SECONDS)
        forked = _await_ranks(entry, client, line)
        entry = replace(entry, backend=forked.backend, labels=forked.labels, reasons=forked.reasons)
        entry = replace(entry, spares=forked.spares)
        entry = with_ranks(entry, client, lambda: entry.parent.is_alive() and not any(deaths_in(entry.folder)))
        _form_world(entry, client)
        registry.save(entry)
        return entry, client, forked.notes
    except Exception as error:
        if client is not None:
            client.close()
        _check_deaths(entry, error)
        raise
    except BaseException:
        if client is not None:
            client.close()
        raise
    finally:
        line.close()


@contextmanager
def _all_or_nothing(name: str, request: StartRequest) -> Iterator[Callable[[float, dict[str, object]], ClusterEntry]]:
    """Yield a function (ttl, options) -> entry that begins the start of `name`. An exception ends everything again."""
    driver = LauncherDriver(request, registry.home() / name)
    folder = make_folder(name)
    coordinator = CoordinatorLauncher(
        work_dir=os.getcwd(),
        profile_dir=str(folder / "profile"),
        cluster_id=name,
        output_file=str(folder / "logs" / "coordinator.log"),
        log=quiet(),
    )
    controller = controller_launcher(folder, name, driver.address)

    def begin(ttl: float, options: dict[str, object]) -> ClusterEntry:
        _write_plan(folder, name, request, ttl, detached=DETACHED in options)
        coordinator.start()
        controller.start()
        process = Process.of(controller.pid)
        (folder / "controller.json").write_text(json.dumps(asdict(process)))
        n = request.num_ranks
        entry = ClusterEntry(
            name=name,
            host=socket.gethostname(),
            n=n,
            backend="gloo",
            ttl=ttl,
            born=time.time(),
            controller=process,
            parent=Process.of(coordinator.pid),
            kernel=Process.of(os.getpid()),
            labels=("",) * n,
            reasons=("",) * n,
            options=options,
        )
        registry.save(entry)
        return entry

    try:
        yield begin
    except BaseException:
        with uninterrupted():
            _give_up(coordinator.pid)
            for started in (coordinator, controller):
                if started.pid > 0:
                    end(started.pid, folder)
            registry.forget(name)
        raise


def _write_plan(folder: Path, name: str, request: StartRequest, ttl: float, *, detached: bool) -> None:
    plan = {
        "name": name,
        "request": saved(request),
        "ttl": ttl,
        "detached": detached,
        "notebook": asdict(Process.of(os.getpid())),
        "cwd": os.getcwd(),
        "environment": environment_of_ranks(),
        "engine_file": str(folder / "profile" / "security" / f"ipcontroller-{name}-engine.json"),
    }
    (folder / "hosts.json").write_text(json.dumps(plan))


def _connected(entry: ClusterEntry, deadline: float) -> Client:
    try:
        return connect(entry, deadline)
    except ClusterError:
        _check(entry)
        raise


def _await_ranks(entry: ClusterEntry, client: Client, line: LiveLine) -> StartProgress:
    """Show the progress until every rank has registered."""
    deadline = 0.0
    while not client.wait_for(entry.n, _LINE_SECONDS):
        state = _check(entry)
        if state:
            line.show(state.words and f"{entry.name}: {state.words}")
        _check_processes(entry)
        _check_deaths(entry)
        if state and state.phase == "forked":
            deadline = deadline or time.monotonic() + _REGISTER_SECONDS
            if time.monotonic() > deadline:
                raise _missing(entry, client, state)
    state = _check(entry)
    assert state is not None
    return state


def _check_processes(entry: ClusterEntry) -> None:
    for process, what in ((entry.parent, "coordinator"), (entry.controller, "controller")):
        if not process.is_alive():
            _check(entry)  # the coordinator may have written the reason
            raise failed(entry, f"The {what} ended while the cluster was starting.", f"{what}.log")


def _check_deaths(entry: ClusterEntry, cause: Exception | None = None) -> None:
    """Raise ClusterError if ranks have died, alone or with their host, instead of waiting for them."""
    if dead := {death.rank: death.how for death in deaths_in(entry.folder)}:
        raise ClusterError(
            f"{ranks_named(sorted(dead))} died while the cluster was starting.",
            numbers="; ".join(dict.fromkeys(dead.values())),
            hint="%cluster start   again",
        ) from cause


def _check(entry: ClusterEntry) -> StartProgress | None:
    state = progress.read(entry.folder)
    if state:
        state.check()
    return state


def _missing(entry: ClusterEntry, client: Client, state: StartProgress) -> ClusterError:
    missing = sorted(set(range(entry.n)) - set(client.ranks))
    info = json.loads((entry.folder / "profile" / "security" / f"ipcontroller-{entry.name}-engine.json").read_text())
    return ClusterError(
        f"Ranks {missing} did not register in {_REGISTER_SECONDS:.0f} s.",
        numbers=f"{state.labels[missing[0]]}; the controller listens at {info['interface']}, port "
        f"{info['registration']} and others",
        hint="a firewall between the hosts must allow their connections",
    )


def _form_world(entry: ClusterEntry, client: Client) -> None:
    try:
        # An earlier notebook may have formed a world before it ended.
        states = client.ask(range(entry.n), GetStatus())
        form(client, entry.n, 1 + max(state["generation"] for state in states.values()))
    except Exception as error:
        _check(entry)
        raise ClusterError(
            "The ranks did not come together in a world.",
            numbers=str(error).strip().splitlines()[-1][:300],
            hint="the hosts must reach each other; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name a network",
        ) from None


def _give_up(coordinator: int) -> None:
    """Let the coordinator end everything that it has started, and wait for this."""
    if coordinator <= 0:
        return
    try:
        process = Process.of(coordinator)
    except ProcessLookupError:
        return
    process.end(signal.SIGTERM)
    deadline = time.monotonic() + registry.SPREAD_PATIENCE
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


class LiveLine:
    """A line of output that is overwritten during a start."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, words: str) -> None:
        """Replace the line."""
        if words != self._shown:
            sys.stdout.write(f"\r{words.ljust(len(self._shown))}")
            sys.stdout.flush()
            self._shown = words

    def close(self) -> None:
        """End the line, so that the next output begins a new one."""
        if self._shown:
            sys.stdout.write("\n")
            self._shown = ""
