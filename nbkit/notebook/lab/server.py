"""Answer the requests of nbkit's sidebar in JupyterLab.

    GET    nbkit/state?kernel=ID&path=NOTEBOOK&ranks=1    clusters, programs, runs, lessons: see `Sidebar.state`
    DELETE nbkit/clusters/NAME                            end a cluster, as `nbkit stop NAME` does
    POST   nbkit/lessons/NAME                             {"path"} of a lesson, copied into nbkit-lessons/ if needed

The server answers, because a kernel may be busy with a training, or missing. The server reads the registry, the record
files and the processes. It asks no rank, so it works even while ranks are stuck.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado.web import HTTPError, authenticated

from nbkit.errors import ClusterError, NbkitError, UsageError
from nbkit.notebook.json_text import json_text

RUNS_AT_MOST = 20
_LESSONS = "nbkit-lessons"  # in the server's folder; `nbkit lab` uses the same name in the working directory


class Sidebar:
    """The content of the sidebar. root: the folder that the server shows."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._readers: dict[Path, Any] = {}
        self._lock = threading.Lock()  # several pages may ask

    def state(self, kernel: int, notebook: str, *, ranks: bool) -> dict[str, Any]:
        """Return {"clusters", "jobs", "runs", "lessons", "notes"}. kernel: pid of the notebook's kernel, 0 for none.

        A cluster is {"name", "n", "state", "alive", "host", "here", "devices", "ranks", "run"}. here: it is this
        notebook's cluster. ranks: [{"rank", "device", "memory", "state"}], empty unless `ranks` is True. run: its
        newest training, {"folder", "stands", "strategy", "rate", "unit", "step"}, or None. jobs: the running jobs, as
        in `nbkit jobs --json`. runs: [{"name", "folder"}], the newest first. lessons: names. notes: lines about
        clusters of another release.
        """
        from nbkit.notebook.cluster import registry  # imported here, because many servers never show the sidebar
        from nbkit.notebook.cluster.job import AttachedJob
        from nbkit.notebook.cluster.newest_run import recorded_by
        from nbkit.notebook.lessons import lesson_names

        with self._lock:
            clusters, recorded = [], []
            for entry in registry.entries():
                alive = entry.is_alive()
                folder = recorded_by(entry) if alive and entry.is_here else None
                recorded += [folder] if folder is not None else []
                clusters.append({
                    "name": entry.name, "n": entry.n, "host": entry.host, "devices": entry.labels, "alive": alive,
                    "state": entry.state, "here": alive and kernel > 0 and entry.kernel.pid == kernel,
                    "ranks": _ranks(entry) if ranks and alive else [],
                    "run": self._training(folder) if folder is not None else None,
                })  # fmt: skip
            self._readers = {folder: self._readers[folder] for folder in recorded}
            jobs = [job for job in AttachedJob.list() if job.state != "ended"]
            return {
                "clusters": clusters,
                "jobs": jobs,
                "runs": self._runs([*recorded], self._root / Path(notebook.strip("/")).parent),
                "lessons": lesson_names(),
                "notes": registry.unreadable(),
            }

    def _training(self, folder: Path) -> dict[str, Any]:
        from nbkit.notebook.run.reader import RunReader

        reader = self._readers.setdefault(folder, RunReader(folder))
        reader.look()
        known, state = reader.curve, reader.state()
        last = known.points[-1] if known.points else None
        strategy = known.strategies[int(last[6])] if last is not None and known.strategies else ""
        told = {key: state[key] for key in ("folder", "stands", "rate", "unit")}
        return {**told, "strategy": strategy, "step": int(last[0]) if last is not None else 0}

    def _runs(self, recorded: list[Path], beside: Path) -> list[dict[str, str]]:
        from nbkit.notebook.cluster import site_settings

        runs = site_settings.read().runs
        found: dict[Path, float] = {}
        for parent in {self._root / runs, beside / runs, *(folder.parent for folder in recorded)}:
            with suppress(OSError):
                for one in os.scandir(parent):
                    if os.path.isdir(os.path.join(one.path, "telemetry")):
                        found[Path(one.path).resolve()] = one.stat().st_mtime
        newest = sorted(found, key=lambda path: -found[path])[:RUNS_AT_MOST]
        return [{"name": path.name, "folder": str(path)} for path in newest]

    def stop(self, name: str) -> None:
        """End a cluster of this user. Raises ClusterNotFound if it is not running, or ClusterError."""
        from nbkit.notebook.cluster import registry

        entry = registry.running(name)
        if entry.folder.stat().st_uid != os.getuid():
            raise ClusterError(f"The cluster {name!r} belongs to another user.", hint="nbkit list")
        registry.end(entry)

    def lesson(self, name: str) -> str:
        """Return the path of a lesson below the server's folder. Copy it there if it is not there yet."""
        from nbkit.notebook.lessons import lesson_names, write_lessons

        if name not in lesson_names():
            raise UsageError("There is no such lesson.", numbers=name, hint="nbkit lab")
        places = [f"{name}.ipynb", f"notebooks/{name}.ipynb", f"{_LESSONS}/{name}.ipynb"]
        found = next((place for place in places if (self._root / place).is_file()), None)
        if found is None:
            write_lessons(self._root / _LESSONS)
        return found or places[-1]


def _ranks(entry: Any) -> list[dict[str, Any]]:
    """Return what is known about each rank without asking it. A rank on another host has no state."""
    from nbkit.notebook.cluster.launch.pins import repinned
    from nbkit.notebook.cluster.output.root_cause import deaths_in
    from nbkit.notebook.cluster.status import memory_by_rank

    entry, deaths = repinned(entry), {death.rank: death for death in deaths_in(entry.folder)}
    used: dict[int, dict[str, Any]] = {}
    for rank, process in enumerate(entry.ranks if entry.is_here and not entry.is_spread else ()):
        with suppress(psutil.Error):
            if process.is_alive():
                used[rank] = {"memory": psutil.Process(process.pid).memory_info().rss}
    memory = memory_by_rank(entry, used) if used else {}
    unseen = "not seen from here" if entry.ranks else "starts"
    rows = []
    for rank, device in enumerate(entry.labels):
        state = f"dead ({deaths[rank].how})" if rank in deaths else "runs" if rank in used else unseen
        rows.append({"rank": rank, "device": device, "memory": memory.get(rank, ""), "state": state})
    return rows


class _Handler(APIHandler):
    auth_resource = "nbkit"

    def initialize(self, sidebar: Sidebar) -> None:
        self.sidebar = sidebar

    async def _answer(self, ask: Callable[[], Any]) -> None:
        """Answer with the result of `ask`, which runs in a thread, or with an NbkitError as {"message"}."""
        try:
            self.finish(json_text(await asyncio.to_thread(ask)))
        except (NbkitError, OSError) as error:
            self.set_status(409)
            self.finish({"message": str(error)})


class StateHandler(_Handler):
    @authenticated  # type: ignore[untyped-decorator]
    @authorized
    async def get(self) -> None:
        notebook, ranks = self.get_argument("path", ""), self.get_argument("ranks", "") == "1"
        pid = 0
        with suppress(KeyError, AttributeError, TypeError, HTTPError):  # the kernel has ended, or runs behind a gateway
            pid = int(self.kernel_manager.get_kernel(self.get_argument("kernel", "")).provisioner.pid)
        await self._answer(lambda: self.sidebar.state(pid, notebook, ranks=ranks))


class ClusterHandler(_Handler):
    @authenticated  # type: ignore[untyped-decorator]
    @authorized
    async def delete(self, name: str) -> None:
        await self._answer(lambda: self.sidebar.stop(name))


class LessonHandler(_Handler):
    @authenticated  # type: ignore[untyped-decorator]
    @authorized
    async def post(self, name: str) -> None:
        await self._answer(lambda: {"path": self.sidebar.lesson(name)})


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: Any) -> None:
    given = {"sidebar": Sidebar(Path(app.root_dir).expanduser())}
    base = url_path_join(app.web_app.settings["base_url"], "nbkit")
    app.web_app.add_handlers(".*$", [
        (url_path_join(base, "state"), StateHandler, given),
        (url_path_join(base, r"clusters/([\w.-]+)"), ClusterHandler, given),
        (url_path_join(base, r"lessons/(\w+)"), LessonHandler, given),
    ])  # fmt: skip
