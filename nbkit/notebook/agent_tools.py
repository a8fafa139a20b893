"""The tools of `nbkit mcp`, with which a program inspects and controls clusters and trainings.

Tools of the tier "look" ask the ranks through a client of their own, which does not disturb a notebook that uses the
cluster. The other tools attach to the cluster like a notebook, so they are refused while a notebook uses it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait as settle
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from nbkit.errors import CellStopped, ClusterError, ClusterNotFound, NbkitError, UsageError
from nbkit.notebook.agent_server import cancelled, tool
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cells.handle import CellHandle, handle_of
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cluster import Cluster, make_current
from nbkit.notebook.cluster.debugging.prompt import PromptTalk
from nbkit.notebook.cluster.launch.launch import connect
from nbkit.notebook.cluster.launch.pins import repinned
from nbkit.notebook.cluster.newest_run import NewestRun, recorded_by
from nbkit.notebook.cluster.output.display import NoScreen, showing
from nbkit.notebook.cluster.output.root_cause import deaths_in
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.status import Status, rank_rows
from nbkit.notebook.cluster.training_control import ControlResult
from nbkit.notebook.cluster.why import ask_why
from nbkit.notebook.export.export import export
from nbkit.notebook.headless import as_shown
from nbkit.notebook.planning import plan
from nbkit.notebook.run.reader import RunReader, read_run
from nbkit.notebook.widgets.panel.view import Looked, State, job_view, reduce
from nbkit.planner.gpt_config import GPTConfig
from nbkit.wire import cluster_end
from nbkit.wire.messages import GetStatus, GetStrategies, GetStrategyRow

PATIENCE_SECONDS = 45.0
"""A program's own timeout is often 60 s. A control that takes longer continues, and the tool's answer says so."""
TABLE_SECONDS = 20.0
"""The limit for the first table of a training, which analyzes its model."""
SHOWN_CHARACTERS = 8_000
_TICK = 0.05
_CLUSTER = "name of the cluster; it may be left out if only one runs"
_RUN = "directory of a recorded run, such as runs/NAME; default: the newest training of the cluster"
_STRATEGY = "a preset, such as zero3, or keys, such as 'dp=2 tp=2'"
_PARTS = "seconds compute exposed_communication waiting bubble data optimizer other".split()
_COSTS = "strategy memory peak_bytes step_s predicted_step_s step_bytes moved_bytes switch_s".split()
T = TypeVar("T")


class KeptScreen(NoScreen):
    """A screen that keeps the text which a notebook would show for a cell."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._size = 0

    def stream(self, name: str, text: str) -> None:
        self._pieces.append(text)
        self._size += len(text)
        while self._size - len(self._pieces[0]) > KEPT_CHARACTERS:
            self._size -= len(self._pieces.popleft())

    @property
    def text(self) -> str:
        """Return the newest text, at most about KEPT_CHARACTERS."""
        return "".join(list(self._pieces))


KEPT_CHARACTERS = 200_000


class AgentTools:
    """The tools. One object serves one program."""

    def __init__(self) -> None:
        self._clusters: dict[str, Cluster] = {}
        self._clients: dict[tuple[str, float], Client] = {}
        self._runs: dict[Connection, NewestRun] = {}  # it may keep a copy of another host's records
        self._lock = threading.RLock()

    # Which cluster ------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> ClusterEntry:
        """Return the running cluster `name`, or the only one. Raises ClusterNotFound, UsageError or ClusterError."""
        try:
            entry = registry.running(name) if name else registry.the_only_one()
        except ClusterNotFound as error:
            raise ClusterNotFound(
                error.what, numbers=error.numbers, hint="list_clusters   or   start_cluster"
            ) from None
        except UsageError as error:
            raise UsageError(error.what, numbers=error.numbers, hint="give the argument `cluster`") from None
        if entry.folder.stat().st_uid != os.getuid():
            raise ClusterError(f"The cluster {entry.name!r} belongs to another user.", hint="list_clusters")
        return entry

    def _reached(self, name: str) -> tuple[ClusterEntry, Client]:
        """Return a cluster's entry, and a client for requests that only read."""
        entry = self._entry(name)
        with self._lock:
            own = self._clusters.get(entry.name)
            if own is not None and not own.connection.why_gone():
                return own.entry, own.connection.client
            if (key := (entry.name, entry.born)) not in self._clients:
                self._clients[key] = connect(entry)
            client = self._clients[key]
        client.wait_for(entry.n, 1.0)
        return repinned(entry), client

    def _own(self, name: str, *, take: bool = False) -> Cluster:
        """Return a cluster, and attach to it if needed. Raises ClusterError if another process uses it."""
        with self._lock:
            entry = self._entry(name)
            own = self._clusters.get(entry.name)
            if own is not None and not own.connection.why_gone():
                return own
            if entry.is_attached() and entry.kernel.pid != os.getpid() and not take:
                raise ClusterError(
                    f"A notebook or another program uses the cluster {entry.name!r}.",
                    numbers=f"it is process {entry.kernel.pid}",
                    hint="if its user agrees: attach, with the argument `take`; "
                    f"%cluster attach {entry.name} --take   gets it back",
                )
            showing.set(KeptScreen())
            own = self._clusters[entry.name] = Cluster.attach(entry.name, take=take)
            return own

    def _ask_one(self, entry: ClusterEntry, client: Client, request: Any) -> dict[str, Any]:
        dead = {death.rank for death in deaths_in(entry.folder)}
        first = min(set(range(entry.n)) - dead, default=0)
        return dict(client.ask([first], request).get(first, {}))

    def _recorded(self, entry: ClusterEntry) -> Path | None:
        """Return the directory of the cluster's newest training, or None without records."""
        own = self._clusters.get(entry.name)
        if own is not None and not own.connection.why_gone():
            return self._runs.setdefault(own.connection, NewestRun(own.connection))()
        return recorded_by(entry)

    def _reader(self, cluster: str, run: str) -> RunReader:
        """Return a reader of a run, or of a cluster's newest training. Raises UsageError without records."""
        if run:
            return read_run(run)
        entry = self._entry(cluster)
        if (folder := self._recorded(entry)) is None:
            raise UsageError(
                f"No training of the cluster {entry.name!r} has been recorded.",
                numbers="a Trainer records what it does, unless it has log_dir=None",
                hint="progress   says what is known without records",
            )
        return read_run(folder)

    # look ---------------------------------------------------------------------------------------------------------

    @tool("look")
    def list_clusters(self) -> Any:
        """List the user's clusters: ranks, devices, age, and whether a notebook uses them."""
        return Cluster.list()

    @tool("look", cluster=_CLUSTER)
    def status(self, cluster: str = "") -> Any:
        """Show each rank of a cluster: process, device, memory, and what it runs. Shows dead ranks too."""
        entry, client = self._reached(cluster)
        answers = client.ask(range(entry.n), GetStatus())
        deaths = {death.rank: death for death in deaths_in(entry.folder)}
        generation = max((answer["generation"] for answer in answers.values()), default=0)
        return Status(entry, rank_rows(entry, answers, deaths), generation)

    @tool("look", cluster=_CLUSTER, stacks="add the stack of every thread")
    def why(self, cluster: str = "", stacks: bool = False) -> Any:
        """Say who is stuck where: one sentence that names the rank to look at, and a row for each rank. Use it if a
        cell or a training does not move."""
        entry, client = self._reached(cluster)
        deaths = {death.rank: death for death in deaths_in(entry.folder)}
        return ask_why(entry, client, deaths, stacks=stacks)

    @tool("look", cluster=_CLUSTER, run=_RUN, points="how many points of the loss curve")
    def progress(self, cluster: str = "", run: str = "", points: int = 20) -> Any:
        """Tell how far a training is: step, loss, speed, strategy, time to go, and points of its loss curve."""
        told: dict[str, Any] = {}
        if not run:
            entry, client = self._reached(cluster)
            answer = self._ask_one(entry, client, GetStatus())
            told = {"training": answer.get("training", False), "now": answer.get("progress", {})}
            if self._recorded(entry) is None:
                return told
        reader = self._reader(cluster, run)
        found = reader.snapshot(anew=False)
        names = ("step", "steps", "seconds", "tokens", "loss", "tokens_per_s", "strategy")
        rows = [dict(zip(names, point, strict=True)) for point in _thinned(found["points"], points)]
        strategies = found["strategies"]
        for row in rows:
            row["strategy"] = strategies[int(row["strategy"])] if row["strategy"] < len(strategies) else ""
        return {**told, "run": found["state"], "points": rows}

    @tool("look", cluster=_CLUSTER, run=_RUN, step="number of a step; default: medians of the newest 20")
    def breakdown(self, cluster: str = "", run: str = "", step: int | None = None) -> Any:
        """Say where the time of a step goes, rank by rank, who is late (a straggler), and what is sent: `reading` has
        the conclusion."""
        found = self._reader(cluster, run).picture(step)
        told = {name: found.get(name) for name in ("step", "of", "strategy", "reading", "late", "seconds", "numbers")}
        ranks = [dict(zip(("rank", *_PARTS), row, strict=True)) for row in found.get("ranks", ())]
        return {**told, "ranks": ranks, "missing": found.get("missing", []), "operations": found.get("table", [])}

    @tool("look", cluster=_CLUSTER, run=_RUN)
    def memory(self, cluster: str = "", run: str = "") -> Any:
        """Show the memory of each rank in bytes: at rest and at the peak of a step, by what it holds."""
        found = self._reader(cluster, run).picture()
        return {"step": found.get("step", 0), "strategy": found.get("strategy", ""), "ranks": found.get("memory", [])}

    @tool("look", cluster=_CLUSTER, run=_RUN, last="how many")
    def events(self, cluster: str = "", run: str = "", last: int = 30) -> Any:
        """List what happened in a training: switches, checkpoints, ranks that died and were replaced, running out of
        memory, failures."""
        told: dict[str, Any] = {}
        if not run:
            entry = self._entry(cluster)
            told["ranks_ended"] = [_ended(end) for end in cluster_end.read_ranks(entry.folder)]
            if self._recorded(entry) is None:
                return told
        found = self._reader(cluster, run).snapshot(anew=False)["events"]
        return {**told, "events": found[-max(1, last) :]}

    @tool("look", cluster=_CLUSTER)
    def strategies(self, cluster: str = "") -> Any:
        """List the strategies that fit the training, with what each costs, and those that do not, with the reason.
        step_s is measured, predicted_step_s is not. `recommended` is "" without evidence: then compare measures.
        A strategy in `unexamined` is examined before a switch to it."""
        entry, client = self._reached(cluster)
        answer: dict[str, Any] = {}
        deadline = time.monotonic() + TABLE_SECONDS
        while time.monotonic() < deadline and not cancelled.get().is_set():
            answer = self._ask_one(entry, client, GetStrategies()) or answer
            table = answer.get("table") or {}
            told = table.get("recommended") or table.get("unpredicted")
            examined = not any(row["untried"] for row in table.get("options", ()))
            if (answer and not answer["job"]) or (told and examined):
                break
            time.sleep(0.5)
        state = reduce(State(entry.name, entry.n), Looked(answer))
        if state.phase in ("none", "gone") or not (job := job_view(state)):
            raise UsageError(
                "There is no Trainer on the ranks yet." if state.phase == "none" else "No costs are known yet.",
                numbers=f"{entry.name}: {state.why or state.phase}",
                hint="start_cell with   trainer = nbkit.Trainer(...)" if state.phase == "none" else "ask again in 10 s",
            )
        options = state.table["options"]
        rows = [{name: row[name] for name in _COSTS if row[name] is not None} for row in options if row["ok"]]
        unfit = {row["strategy"]: row["why"] for row in options if not row["ok"] and not row["untried"]}
        costs = {"rows": rows, "unfit": unfit, "unexamined": [row["strategy"] for row in options if row["untried"]]}
        names = ("strategy", "recommended", "because", "unpredicted")
        found = {name: job[name] for name in names} | {"limit_bytes": state.table["limit_bytes"]}
        return {"phase": state.phase, **found, **costs}

    @tool("look", cluster=_CLUSTER, strategy=_STRATEGY)
    def estimate(self, strategy: str, cluster: str = "") -> Any:
        """Predict what a switch to one strategy would cost, and whether it fits the model."""
        entry, client = self._reached(cluster)
        row = self._ask_one(entry, client, GetStrategyRow(strategy)).get("row")
        if row is None:
            raise UsageError(
                f"{strategy!r} cannot be estimated.",
                numbers="there is no Trainer on the ranks, or it is no strategy of their number",
                hint="strategies",
            )
        return {name: value for name, value in row.items() if name != "held"}

    @tool(
        "look",
        batch="rows of a global batch",
        on="hardware in a line: '8 H100', or '16 x 8 H100 net=50GB/s' for 16 nodes",
        layers="blocks of the GPT",
        width="features of a token",
        heads="attention heads; they divide the width",
        vocab="different tokens",
        block="tokens of the longest text",
        precision="bf16, fp16 or fp32",
        rows="how many strategies, the best first",
    )
    def plan(
        self,
        batch: int,
        on: str,
        layers: int,
        width: int,
        heads: int,
        vocab: int = 50_304,
        block: int = 1024,
        precision: str = "bf16",
        rows: int = 5,
    ) -> Any:
        """Choose a strategy for a GPT on hardware that one line describes. It needs no cluster: it only
        calculates."""
        config = GPTConfig(vocab=vocab, block=block, layers=layers, heads=heads, width=width)
        made = plan(config, batch=batch, on=on, precision=None if precision == "fp32" else precision)
        told = {
            name: getattr(made, name) for name in ("model", "batch", "on", "devices", "usable", "unit", "considered")
        }
        return {**told, "rows": made.rows[: max(1, rows)], "refused": len(made.refused), "why": made.refused[:3]}

    @tool("look", cluster=_CLUSTER, characters="how many of the newest characters")
    def cell_output(self, cluster: str = "", characters: int = SHOWN_CHARACTERS) -> Any:
        """Show what the newest cell has printed, whether it runs, and how it ended."""
        entry, client = self._reached(cluster)
        own = self._clusters.get(entry.name)
        latest = own.connection.latest if own is not None else None
        if own is not None and client is own.connection.client and latest is not None:
            return _cell(latest, characters)
        answers = client.ask(range(entry.n), GetStatus())
        tails = {rank: _tail(entry.folder / "output" / f"rank{rank}.out", characters) for rank in range(entry.n)}
        return {"status": "running" if any(each["cell"] for each in answers.values()) else "idle", "ranks": tails}

    # steer --------------------------------------------------------------------------------------------------------

    @tool("steer", cluster=_CLUSTER, take="take it from a notebook that uses it; ask its user first")
    def attach(self, cluster: str = "", take: bool = False) -> Any:
        """Attach to a cluster. The other tools do it by themselves; this one can also take a cluster from a notebook,
        which then shows that it was taken."""
        return self._own(cluster, take=take).status()

    @tool("steer", cluster=_CLUSTER, strategy=_STRATEGY)
    def switch(self, strategy: str, cluster: str = "") -> Any:
        """Change the strategy of the training, also while it makes steps. Nothing is lost if it is refused."""
        own = self._own(cluster)
        return _patiently(lambda: own.training.switch(strategy))

    @tool("steer", cluster=_CLUSTER)
    def undo(self, cluster: str = "") -> Any:
        """Go back to the strategy before the last switch. The weights stay as they are."""
        own = self._own(cluster)
        return _patiently(own.training.undo)

    @tool("steer", cluster=_CLUSTER, strategies=f"each {_STRATEGY}", steps="steps of each")
    def compare(self, strategies: list[str], cluster: str = "", steps: int = 10) -> Any:
        """Measure strategies in turns, from one state on the same batches. Then the training goes on as if nothing had
        happened."""
        own = self._own(cluster)
        return _patiently(lambda: own.training.compare(*strategies, steps=steps))

    @tool("steer", cluster=_CLUSTER, rate="of the first parameter group; others keep their ratio to it")
    def set_lr(self, rate: float, cluster: str = "") -> Any:
        """Set the learning rate of the Trainer at its next step boundary. A schedule keeps its shape."""
        own = self._own(cluster)
        return _patiently(lambda: own.training.lr(rate))

    @tool("steer", cluster=_CLUSTER)
    def pause(self, cluster: str = "") -> Any:
        """Hold the training at its next step boundary until it is resumed or stopped."""
        own = self._own(cluster)
        return _patiently(own.training.pause)

    @tool("steer", cluster=_CLUSTER)
    def resume(self, cluster: str = "") -> Any:
        """Let a paused training go on."""
        own = self._own(cluster)
        return _patiently(own.training.resume)

    @tool("steer", cluster=_CLUSTER)
    def save(self, cluster: str = "") -> Any:
        """Write a checkpoint of the training into the directory of its run."""
        own = self._own(cluster)
        return _patiently(own.training.save)

    @tool(
        "steer",
        cluster=_CLUSTER,
        end_after="seconds after which ranks that do not answer are ended; their variables are lost. Default: never",
    )
    def stop(self, cluster: str = "", end_after: float | None = None) -> Any:
        """Stop the cell that runs: a training at its next step boundary, with its state intact. It also frees ranks
        that hang in a collective, and their variables stay."""
        own = self._own(cluster)
        if (handle := handle_of(own.connection)) is None:
            raise UsageError("No cell runs, so there is nothing to stop.", hint="status")
        return self._stopped(own, handle, end_after)

    # code ---------------------------------------------------------------------------------------------------------

    @tool(
        "code",
        ranks="processes; default: one for each idle GPU, or two without a GPU",
        name="default: a name is made up",
        cpu="CPU ranks even if there are GPUs",
        gpus="these GPUs, such as 2,3",
        ttl="seconds without a program and without a running cell, after which it ends; default: two hours",
    )
    def start_cluster(
        self, ranks: int | None = None, name: str = "", cpu: bool = False, gpus: str = "", ttl: float | None = None
    ) -> Any:
        """Start a cluster on this machine. It lives on when this program ends, until its ttl is over."""
        name = name or registry.made_up_name()
        showing.set(KeptScreen())
        own = Cluster.start(ranks, name=name, cpu=cpu, gpus=gpus or None, ttl=ttl)
        with self._lock:
            self._clusters[name] = own
        return own.status()

    @tool("code", cluster=_CLUSTER)
    def restart_cluster(self, cluster: str = "") -> Any:
        """End all ranks of a cluster and start them again. Their variables are lost."""
        return self._own(cluster).restart().status()

    @tool("code", cluster=_CLUSTER)
    def stop_cluster(self, cluster: str = "") -> Any:
        """End a cluster. What its ranks hold is lost."""
        entry = self._entry(cluster)
        own = self._clusters.get(entry.name)
        if own is None and entry.is_attached():
            self._own(cluster)  # raises an error that says who uses it
        if own is not None:
            own.stop()
        else:
            registry.end(entry)
        self._clusters.pop(entry.name, None)
        return {"stopped": entry.name, "ranks": entry.n}

    @tool(
        "code",
        code="Python; each rank has rank, world_size, device, torch, dist and nbkit",
        cluster=_CLUSTER,
        ranks="only on these, such as 0,2-3",
        timeout="seconds after which the cell is stopped",
        at_step="run it between two steps of the training that runs",
    )
    def run_cell(
        self, code: str, cluster: str = "", ranks: str = "", timeout: float = 40.0, at_step: bool = False
    ) -> Any:
        """Run a cell on the ranks and wait for it. Returns what it showed and the value of its last line on each
        rank."""
        own, handle = self._send(cluster, code, ranks, at_step)
        execution, deadline = handle._execution, time.monotonic() + timeout
        while not execution.done.done():
            settle([execution.done], _TICK)
            if execution.prompts:  # nobody can type here: tell the ranks
                PromptTalk(own.connection.client, execution).answer_all()
            if time.monotonic() > deadline or cancelled.get().is_set():
                sentence = own.why().sentence
                told = self._stopped(own, handle, 10.0)
                return {**told, "why": sentence, "timeout": f"It was stopped after {timeout:g} s. {sentence}"}
        return _cell(execution)

    @tool(
        "code",
        code="Python, such as   trainer.fit(1000)",
        cluster=_CLUSTER,
        ranks="only on these, such as 0,2-3",
    )
    def start_cell(self, code: str, cluster: str = "", ranks: str = "") -> Any:
        """Start a cell, such as a training, and return at once. progress and cell_output follow it, stop ends it."""
        _, handle = self._send(cluster, code, ranks, False)
        settle([handle._execution.done], 0.5)
        return _cell(handle._execution)

    @tool(
        "code",
        path="file to write, such as train.py",
        cluster=_CLUSTER,
        notebook="a saved notebook whose cells are taken; default: the cells that this program has run",
    )
    def export_script(self, path: str, cluster: str = "", notebook: str = "") -> Any:
        """Write the cells that the ranks have run as one script for torchrun, which needs no Jupyter."""
        with self._lock:
            if not notebook:
                make_current(self._own(cluster))
            made = export(path, notebook or None)
        files = [str(file.absolute()) for file in (made.path, *(file for file, _ in made.beside))]
        return {"files": files, "run": made.run, "notes": made.notes, "left_out": made.left_out}

    # Cells --------------------------------------------------------------------------------------------------------

    def _send(self, cluster: str, code: str, ranks: str, at_step: bool) -> tuple[Cluster, CellHandle]:
        own = self._own(cluster)
        showing.set(KeptScreen())
        return own, own.run(code, ranks or None, detach=True, at_step=at_step)

    def _stopped(self, own: Cluster, handle: CellHandle, end_after: float | None) -> dict[str, Any]:
        """Stop a cell, and return its state. If a rank does not end, the stop goes on in its own thread."""
        execution = handle._execution

        def climb() -> None:
            with suppress(Exception, CellStopped):  # `_cell` returns the cell's error
                handle.stop(end_after)

        threading.Thread(target=climb, name="nbkit-stop", daemon=True).start()
        settle([execution.done], PATIENCE_SECONDS)
        told = _cell(execution)
        if told["status"] == "running":
            words = execution.stop.words if execution.stop is not None else ""
            told["status"] = "stopping"
            told["says"] = f"{words} → stop with end_after=5 ends the ranks that do not answer"
        return told


def _patiently(control: Callable[[], ControlResult]) -> dict[str, Any]:
    """Return the result of a control, or after PATIENCE_SECONDS the status "waiting". Then the control goes on."""
    found: list[ControlResult | BaseException] = []

    def run() -> None:
        try:
            found.append(control())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="nbkit-control", daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while thread.is_alive() and time.monotonic() < deadline and not cancelled.get().is_set():
        thread.join(_TICK)
    if not found:
        return {
            "status": "waiting",
            "says": "The ranks have not done it yet: they do it at their next step boundary. → why   or   progress",
        }
    if isinstance(found[0], BaseException):
        raise found[0]
    done = found[0]
    told = {name: getattr(done, name) for name in ("do", "step", "strategy", "result", "predicted", "deviations")}
    return {"status": "done", "says": repr(done), **told}


def _cell(execution: Execution, characters: int = SHOWN_CHARACTERS) -> dict[str, Any]:
    """Return the current state of a cell. characters: how much of its newest text to return."""
    done, screen = execution.done, execution.outbox.screen
    text = as_shown(screen.text) if isinstance(screen, KeptScreen) else ""
    if (more := len(text) - max(1, characters)) > 0:
        text = f"… {more:,} characters are left out: cell_output shows more, the output folder has all …\n{text[more:]}"
    told: dict[str, Any] = {"cell": execution.describe(), "status": "running", "shown": text}
    if done.done() and (error := done.exception()) is not None:
        told["status"] = "error"
        told["error"] = str(error) if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
    elif done.done():
        results: Results = done.result()
        values = {rank: value for rank, value in results.values.items() if value is not None}
        told |= {"status": results.status, "values": values, "seconds": results.seconds}
    return told


def _ended(end: Any) -> dict[str, Any]:
    told = asdict(end)
    return {name: told[name] for name in ("rank", "how", "when", "pid", "replaced", "said")}


def _thinned(points: Sequence[T], wanted: int) -> list[T]:
    """Return at most `wanted` points at equal distances, including the last one."""
    if len(points) <= max(1, wanted):
        return list(points)
    every = (len(points) - 1) / max(1, wanted - 1)
    return [points[round(i * every)] for i in range(wanted - 1)] + [points[-1]]


def _tail(path: Path, characters: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4 * characters))
            return file.read().decode(errors="replace")[-characters:]
    except OSError:
        return ""
