"""Start a cluster on this machine: an ipyparallel controller and the parent of the ranks. All or nothing.

Both are slow to start (one forks schedulers, the other imports torch), so they start at the same time. The returned
cluster has a world: an all-reduce over all ranks has succeeded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import psutil
from ipyparallel.cluster.launcher import EngineLauncher, LocalControllerLauncher, LocalProcessLauncher

from nbkit.errors import ClusterError, ClusterExists
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.launch.controller import FAST_MS
from nbkit.notebook.cluster.launch.pins import Pinning
from nbkit.notebook.cluster.launch.platform_check import starts_by_forking
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.user_files import uninterrupted
from nbkit.quoting import path_part
from nbkit.wire.cells import SIGNATURES_KEPT
from nbkit.wire.processes import Process, followers
from nbkit.wire.user_code import OWN_MODULES

START_SECONDS = 180.0
LOG_LINES = 15


class ParentLauncher(LocalProcessLauncher, EngineLauncher):  # type: ignore[misc]
    """ipyparallel's launcher for the parent, the process that forks the ranks of this host."""

    def find_args(self) -> list[str]:
        return [sys.executable, *OWN_MODULES, "nbkit.bridge.parent.parent", str(Path(self.profile_dir).parent)]


def launch(name: str, pinning: Pinning, ttl: float, options: dict[str, object]) -> tuple[ClusterEntry, Client]:
    """Start cluster `name`. Raises ClusterExists, or ClusterError with the last log lines. Then nothing is left."""
    folder = make_folder(name)
    # Create both before anything starts, so that after an interrupt everything can be ended.
    launcher, controller = _parent_launcher(folder, name), controller_launcher(folder, name)
    try:
        _write_spec(folder, name, pinning, ttl)
        launcher.start()
        controller.start()
        process = Process.of(controller.pid)
        (folder / "controller.json").write_text(json.dumps(asdict(process)))
        entry = ClusterEntry(
            name=name,
            host=socket.gethostname(),
            n=len(pinning.pins),
            backend=pinning.backend,
            ttl=ttl,
            born=time.time(),
            controller=process,
            parent=Process.of(launcher.pid),
            kernel=Process.of(os.getpid()),
            labels=tuple(pin.label for pin in pinning.pins),
            reasons=tuple(pin.why for pin in pinning.pins),
            options=options,
            spares=tuple(pin.label for pin in pinning.spares),
        )
        registry.save(entry)
        return with_all_ranks(entry)
    except BaseException:
        with uninterrupted():
            for started in (launcher, controller):
                if started.pid > 0:
                    end(started.pid, folder)
            registry.forget(name)
        raise


def with_all_ranks(entry: ClusterEntry) -> tuple[ClusterEntry, Client]:
    """Wait until all ranks of a starting cluster have answered, and register them. Raises ClusterError."""
    deadline = time.monotonic() + START_SECONDS
    client = connect(entry, deadline)
    try:
        _await_ranks(entry, client, deadline)
        entry = with_ranks(entry, client)
        registry.save(entry)
        return entry, client
    except BaseException:
        client.close()
        raise


def connect(entry: ClusterEntry, deadline: float | None = None) -> Client:
    """Wait until the controller has written its address, and return a client of it."""
    path = entry.folder / "profile" / "security" / f"ipcontroller-{entry.name}-client.json"
    while True:
        if path.exists() and path.stat().st_size:
            try:
                return Client(path)
            except json.JSONDecodeError:
                pass  # the file is being written
        if deadline is None or time.monotonic() > deadline or not entry.controller.is_alive():
            raise failed(entry, "The controller did not start.", "controller.log")
        time.sleep(0.01)


def make_folder(name: str) -> Path:
    if name != path_part(name) or any(not (letter.isalnum() or letter in "-_.") for letter in name):
        raise ClusterError(
            "A cluster's name is made of letters, digits, '-', '_' and '.', and does not begin with '-' or '.'.",
            numbers=f"--name {name[:200]!r}",
            hint="--name lesson",
        )
    found = registry.find(name)
    if found and found.is_alive():
        raise ClusterExists(
            f"A cluster called {name!r} is running.",
            numbers=f"{found.n} ranks on {found.host}, started {(time.time() - found.born) / 60:.0f} min ago",
            hint=f"%cluster attach {name}   or   %cluster stop {name}   or another --name",
        )
    if found:
        registry.end(found)
    registry.forget(name)
    folder = registry.home() / name
    registry.check_home()
    for part in ("logs", "output", "profile/security"):
        (folder / part).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    return folder


def _write_spec(folder: Path, name: str, pinning: Pinning, ttl: float) -> None:
    spec = {
        "name": name,
        "folder": str(folder),
        "profile_dir": str(folder / "profile"),
        "engine_file": str(folder / "profile" / "security" / f"ipcontroller-{name}-engine.json"),
        "backend": pinning.backend,
        "device": pinning.device,
        "ttl": ttl,
        "launcher": asdict(Process.of(os.getpid())),
        "forked": os.environ.get("NBKIT_START", "fork" if starts_by_forking() else "spawn") == "fork",
        "pins": [pin.saved for pin in pinning.pins],
        "spares": [pin.saved for pin in pinning.spares],
        "retired": [pin.saved for pin in pinning.retired],
    }
    (folder / "spec.json").write_text(json.dumps(spec))


def _parent_launcher(folder: Path, name: str) -> ParentLauncher:
    return ParentLauncher(
        work_dir=os.getcwd(),
        profile_dir=str(folder / "profile"),
        cluster_id=name,
        output_file=str(folder / "logs" / "parent.log"),
        environment=environment_of_ranks(),
        log=quiet(),
    )


def environment_of_ranks() -> dict[str, str]:
    """Return environment variables for ranks, on this host and on others."""
    site = site_settings.read()
    return {
        # The parent will fork: it may check for a GPU, but must not initialize CUDA for that.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # engines set it, but the parent imports the debugger before
        "NBKIT_RUNS": str(site.runs),
        "NBKIT_MAX_DISK": str(site.max_disk or ""),
        **without_errors(os.environ),
    }


def without_errors(environment: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONWARNINGS with "error" replaced by "default", or {} if it does not contain "error".

    So a warning of a library does not end the process.
    """
    filters = environment.get("PYTHONWARNINGS", "")
    parts = [re.sub("^ *error", "default", part) for part in filters.split(",")]
    return {"PYTHONWARNINGS": ",".join(parts)} if "error" in filters else {}


def controller_launcher(folder: Path, name: str, address: str = "") -> LocalControllerLauncher:
    """Return ipyparallel's launcher for the controller.

    ipyparallel's Cluster is not used, because it starts the launcher in a thread, which an interrupt does not reach.
    address: of this host, for other hosts. Messages are signed and encrypted even on a single host, because every user
    of the host can subscribe to the output of cells that the controller publishes.
    """
    config = "from nbkit.notebook.cluster.launch import controller\n\n"
    config += "controller.slow_down()\ncontroller.keep_none()\ncontroller.hold_ports()\n"
    config += "controller.end_with_schedulers()\n"
    # With encryption, ipyparallel stops signing, and clients warn about it. A key makes it sign.
    key = secrets.token_hex(32).encode()
    config += f"c = get_config()\nc.IPController.enable_curve = True\nc.Session.key = {key!r}\n"
    config += f"c.Session.digest_history_size = {SIGNATURES_KEPT}\n"
    path = folder / "profile" / "ipcontroller_config.py"
    path.touch(mode=0o600)
    path.write_text(config)
    network = [f"--ip={address}", f"--location={address}"] if address else []
    # By default the hub gives up a rank that shows no heartbeat within 30 s. Then it can never register.
    patience = f"--IPController.registration_timeout={START_SECONDS:.0f}"
    return LocalControllerLauncher(
        controller_cmd=[sys.executable, *OWN_MODULES, "ipyparallel.controller"],
        work_dir=os.getcwd(),
        profile_dir=str(folder / "profile"),
        cluster_id=name,
        output_file=str(folder / "logs" / "controller.log"),
        environment=without_errors(os.environ),
        controller_args=[f"--HeartMonitor.period={FAST_MS}", patience, "--nodb", "--log-level=40", *network],
        log=quiet(),
    )


def quiet() -> logging.Logger:
    """Return a logger for ipyparallel's launchers that drops low levels.

    At low levels they copy their process's output to the notebook. It is in the log file anyway.
    """
    logger = logging.getLogger("nbkit.launch")
    logger.setLevel(logging.ERROR)
    return logger


def _await_ranks(entry: ClusterEntry, client: Client, deadline: float) -> None:
    while not client.wait_for(entry.n, 0.25):
        if not entry.parent.is_alive():
            dead = sorted(entry.folder.glob("rank*.end.json"))
            log = f"{dead[0].name.split('.')[0]}.log" if dead else "parent.log"
            raise failed(entry, "A rank ended while the cluster was starting.", log)
        _check_controller(entry)
        if time.monotonic() > deadline:
            missing = sorted(set(range(entry.n)) - set(client.ranks))
            log = f"rank{missing[0]}.log"
            raise failed(entry, f"Ranks {missing} did not come up in {START_SECONDS:.0f} s.", log)


def _check_controller(entry: ClusterEntry) -> None:
    if entry.is_here and not entry.controller.is_alive():
        raise failed(entry, "The controller ended while the cluster was starting.", "controller.log")


def with_ranks(entry: ClusterEntry, client: Client, is_worth_it: Callable[[], bool] | None = None) -> ClusterEntry:
    """Wait until each rank has answered a call and has a world. Return the entry with the processes of its ranks.

    is_worth_it: returns False to stop waiting; by default, if the ranks' parent or the controller has ended.
    """
    answers = client.reach(range(entry.n), START_SECONDS, is_worth_it or entry.is_alive)
    if len(answers) < entry.n:
        _check_controller(entry)
        silent = sorted(set(range(entry.n)) - set(answers))
        raise failed(entry, f"Ranks {silent} have registered but do not answer.", f"rank{silent[0]}.log")
    wrong = {rank: answer["rank"] for rank, answer in answers.items() if answer["rank"] != rank}
    if wrong:
        raise ClusterError(
            "Engine ids and ranks differ.", numbers=f"engine: rank {wrong}", hint="%cluster start   again"
        )
    ranks = tuple(Process(**answers[rank]["process"]) for rank in range(entry.n))
    return ClusterEntry(**{**entry.__dict__, "ranks": ranks})


def failed(entry: ClusterEntry, what: str, log: str) -> ClusterError:
    """Return the error for a failed start, with the last lines of a log."""
    path = entry.folder / "logs" / log
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:] if path.exists() else []
    return ClusterError(
        what,
        numbers=f"the last lines of {log}:\n    " + "\n    ".join(lines or ["(it is empty)"]),
        hint="nbkit doctor   (in a terminal) says what is missing",
    )


def end(pid: int, folder: Path) -> None:
    """End a process that nbkit started, and its children. If it has already ended, end the rest of its session."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    for follower in followers(pid, folder):
        follower.end(signal.SIGKILL)
    psutil.wait_procs(family, timeout=5)
