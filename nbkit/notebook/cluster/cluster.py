"""The cluster as a user has it: start, run, stop. Every magic is one call of this module.

cluster = Cluster.start(n=4, name="lesson")
cluster.run("x = torch.ones(1) * rank; dist.all_reduce(x); x")
cluster.stop()

`push` and `pull` move values between the notebook and the ranks through shared memory, never through the controller.
Ranks that may be on another host share no memory with the notebook; their values travel as cells do.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ipyparallel.error import IPythonError

from nbkit.durations import seconds_given
from nbkit.errors import ClusterError, ClusterExists, NbkitError, TransferError, UsageError
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.connection import Connection
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.cells.handle import CellHandle, until_training, wait_async, wait_for, wait_here
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.submit import request_for
from nbkit.notebook.cluster.debugging.debug import debug
from nbkit.notebook.cluster.hosts.launcher import StartRequest, launcher_request, loaded, saved
from nbkit.notebook.cluster.hosts.requeue import watch
from nbkit.notebook.cluster.hosts.start import reach_on_hosts, submit_to_hosts
from nbkit.notebook.cluster.hosts.sync_files import Synced, project_at, sync
from nbkit.notebook.cluster.launch.launch import connect, with_all_ranks
from nbkit.notebook.cluster.launch.pins import pinning_of, pins_within, repinned, resized_pins
from nbkit.notebook.cluster.launch.platform_check import check_platform
from nbkit.notebook.cluster.launch.started import Started, launched, launched_on_hosts
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.notebook.cluster.machine.remarks import notes_at_start
from nbkit.notebook.cluster.output import display
from nbkit.notebook.cluster.output.rank_tabs import RankTabs
from nbkit.notebook.cluster.registry import ClusterEntry, Process, chosen_ranks, made_up_name, notebook_number
from nbkit.notebook.cluster.sent_cells import SentCell, SentValues
from nbkit.notebook.cluster.status import ClusterList, Status, rank_rows
from nbkit.notebook.cluster.training_control import ControlResult, TrainingClient
from nbkit.notebook.cluster.why import Why, ask_why
from nbkit.notebook.tracing import TraceFile
from nbkit.wire import parcel
from nbkit.wire.cells import CellRequest, ranks_text
from nbkit.wire.messages import GetStatus


def push(
    client: Client, values: dict[str, Any], ranks: Sequence[int], *, force: bool = False, shared: bool = True
) -> None:
    """Assign `values` by name on `ranks`. shared: make one copy in shared memory, however many ranks read it.

    Raises TransferError for a value that cannot be pickled, or is over 1 GB and not forced.
    """
    names = " ".join(values)
    _identifiers(values)
    try:
        packed = parcel.pack(values)
    except Exception as error:
        raise TransferError(
            f"{names} cannot travel to another process.",
            numbers=f"{type(error).__name__}: {error}",
            hint="make it on the ranks, in a %%distributed cell",
        ) from None
    _check_size(names, parcel.size_of(packed), force, f"%push {names} --force")
    path = parcel.write(packed) if shared else ""
    try:
        if shared:
            answers = client.call_and_wait(ranks, "nbkit.bridge.calls:put", path)
        else:
            answers = client.call_and_wait(ranks, "nbkit.bridge.calls:put_parts", parcel.packed_bytes(packed))
        if why := next(filter(None, answers.values()), ""):
            raise ClusterError(why)
    except Exception as error:
        raise TransferError(
            f"{names} could not be assigned on ranks {ranks_text(list(ranks))}.",
            numbers=str(error).strip().splitlines()[-1][:300],
            hint="an instance of a class that a notebook cell defines needs that class on the ranks too: "
            "define it in a %%distributed cell (--here defines it in both places)",
        ) from None
    finally:
        if shared:
            Path(path).unlink(missing_ok=True)


def pull(
    client: Client, expression: str, ranks: Sequence[int], *, force: bool = False, shared: bool = True
) -> list[Any]:
    """Return the value of `expression` on each of `ranks`. A tensor becomes an array unless this process has torch."""
    limit = 1 << 62 if force else parcel.LIMIT_BYTES
    token = parcel.reserve() if shared else ""
    try:
        answers = client.call_and_wait(ranks, "nbkit.bridge.calls:get", expression, limit, token)
        return [_opened(expression, rank, answers[rank], force) for rank in ranks]
    except (IPythonError, ClusterError) as error:
        raise TransferError(
            f"{expression} could not be fetched from ranks {ranks_text(list(ranks))}.",
            numbers=str(error).strip().splitlines()[-1][:300],
            hint="%cluster status",
        ) from None
    finally:
        if shared:
            parcel.discard(token)


def _opened(expression: str, rank: int, answer: dict[str, Any], force: bool) -> Any:
    if "type" in answer:
        raise TransferError(
            f"{expression} on rank {rank} cannot be sent: its type is {answer['type']}.",
            numbers=answer["error"],
            hint=f"a field of it, or its text: %pull {_typed(f'str({expression})')} --rank {rank}",
        )
    if "error" in answer:
        raise TransferError(
            f"{expression!r} has no value on rank {rank}.",
            numbers=answer["error"],
            hint=f"%%rank {rank}   to look there",
        )
    _check_size(expression, answer["bytes"], force, f"%pull {_typed(expression)} --rank {rank} --force")
    try:
        return parcel.read(answer["path"]) if "path" in answer else parcel.unpack(answer["parts"])
    except Exception as error:  # building a value runs code of its class
        unknown = isinstance(error, AttributeError | ImportError)
        what = "is of a type that the notebook does not know" if unknown else "cannot be built in the notebook"
        raise TransferError(
            f"{expression} of rank {rank} {what}.",
            numbers=str(error) if unknown else f"{type(error).__name__}: {error}",
            hint="pull plain data instead, for example its state_dict() or str()",
        ) from None


def _typed(expression: str) -> str:
    """Return an expression as an argument of a magic, which splits a line as a shell does."""
    return shlex.quote(expression) if set(expression) & set(" '\"#\\") else expression


def _identifiers(values: dict[str, Any]) -> None:
    wrong = [name for name in values if not name.isidentifier()]
    if wrong:
        raise TransferError(f"{wrong[0]!r} is not a name that can be assigned.", hint="%push name [name ...]")


def _check_size(name: str, size: int, force: bool, command: str) -> None:
    if size > parcel.LIMIT_BYTES and not force:
        raise TransferError(
            f"{name} is too large to copy without --force.",
            numbers=f"{size / 1e9:.2f} GB, the limit is {parcel.LIMIT_BYTES / 1e9:.2f} GB",
            hint=command,
        )


REACH_SECONDS = 30.0
_current: Cluster | None = None
_observers: list[Callable[[Cluster, Execution], object]] = [lambda cluster, cell: watch(cluster, cell, cluster._again)]


def current() -> Cluster:
    """Return the cluster that cells of this notebook run on. Raises ClusterError if there is none."""
    if _current is None or _current.ended:
        alive = [entry for entry in registry.entries() if entry.is_alive()]
        free = next((f"%cluster attach {entry.name}   or   " for entry in alive if not entry.is_attached()), "")
        raise ClusterError(
            "This notebook has no cluster.",
            numbers=f"running: {', '.join(entry.name for entry in alive) or 'none'}",
            hint=f"{free}%cluster start -n 2",
        )
    return _current


def make_current(cluster: Cluster) -> None:
    """Make `cluster` the one that cells and exports are about, in a program that has several."""
    global _current
    _current = cluster


def is_current(name: str) -> bool:
    """Return True if this notebook's cluster is called `name`."""
    return _current is not None and not _current.ended and _current.entry.name == name


def observe_cells(observer: Callable[[Cluster, Execution], object]) -> None:
    """Call `observer` with the cluster and the execution of each ordinary cell after it was sent."""
    if observer not in _observers:
        _observers.append(observer)


class Cluster:
    """A running cluster. Made by `start` or `attach`, never directly."""

    def __init__(self, started: Started) -> None:
        self.before_stop: list[Callable[[], object]] = []  # called once, by whoever stops it here
        self._use(started)

    def _use(self, started: Started) -> None:
        global _current
        self.connection, self.pinning = started.connection, started.pinning
        self.started_in, self.notes = started.seconds, started.notes
        self.training = TrainingClient(started.connection)  # switch, undo, try, pause, save, stop
        self.sent: list[SentCell | SentValues] = []  # since the ranks are there, in order
        _current = self

    @property
    def entry(self) -> ClusterEntry:
        """Return the cluster as it is registered."""
        return self.connection.entry

    @property
    def ended(self) -> bool:
        """Return True if it was stopped, or attached anew."""
        return bool(self.connection.ended)

    # Life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        n: int | None = None,
        *,
        name: str | None = None,
        gpus: str | None = None,
        cpu: bool = False,
        spares: int = 0,
        ttl: str | float | None = None,
        on: StartRequest | None = None,
        launcher: str | None = None,
        nodes: int | None = None,
        options: Sequence[str] = (),
    ) -> Cluster:
        """Start a cluster on this machine or on other hosts, and make it the notebook's cluster.

        n: number of ranks; None (the default): one per idle GPU, one if others use the GPUs, two without a GPU. name:
        the cluster's name; None (the default): nbkit makes one up. gpus: a choice of GPUs, such as "2,3". cpu: make CPU
        ranks even if there are GPUs. spares: number of GPUs, or sets of cores, that each host keeps in reserve. If the
        device of a rank fails in a training, the rank moves to a spare. The last GPUs of `gpus` are the spares. ttl:
        how long the cluster lives without a notebook and without a running cell, in seconds or as "12h"; None (the
        default): the value in nbkit.toml, or else two hours. on: a StartRequest, for a launcher with its own options.
        It also gives the number of ranks. launcher: the name of a launcher (docs/reference/own-launchers.md). nodes:
        number of hosts for the launcher. options: words that are passed to the launcher.

        Returns when every rank has answered and the process group has done an all-reduce. Raises ClusterError,
        ClusterExists or UsageError. Then no process is left running.
        """
        check_platform()
        settings = site_settings.read()
        ttl = settings.ttl_of(ttl)
        named = name is not None
        if launcher is not None:
            on = launcher_request(launcher, n, nodes, options=tuple(options), cpu=cpu, spares=spares)
        if on is not None:
            spares = spares or on.spares
            on = replace(on, spares=spares)
        asked: dict[str, object] = {"n": n, "gpus": gpus, "cpu": cpu} if on is None else {"on": saved(on)}
        kept = {**asked, **({"spares": spares} if spares else {}), "ttl": ttl, "named": named}
        if name is None and _current is not None and (again := _current._taken_again(kept)):
            return again
        if on is not None:
            return cls(launched_on_hosts(name or made_up_name(), on, ttl, kept))
        machine = read_machine()
        plan = pins_within(settings, machine, n, gpus, cpu=cpu, spares=spares)
        plan = replace(plan, notes=(*notes_at_start(machine, n=n, gpus=gpus, cpu=cpu), *plan.notes))
        return cls(launched(name or made_up_name(), plan, ttl, kept))

    def _taken_again(self, options: dict[str, object]) -> Cluster | None:
        """Return this nameless cluster if its cell is run again, or None if it is gone.

        A second one would only hold devices. Raises ClusterExists if it was started with other options.
        """
        if self.ended or self.connection.deaths or self.entry.options.get("named") or not self.entry.is_alive():
            return None
        if self.entry.options != options:
            raise ClusterExists(
                f"This notebook has a cluster already: {self.entry.name}.",
                numbers=f"{self.entry.n} ranks, started with other options",
                hint="%cluster stop   first; or --name for a second one",
            )
        self.notes = ("It was running already and is taken as it is; %cluster restart gives fresh ranks.",)
        return self

    @classmethod
    def submit(cls, on: StartRequest, *, name: str | None = None, ttl: str | float | None = None) -> ClusterList:
        """Request the hosts of a cluster, and return the list of clusters at once. `attach` connects to the new
        cluster.

        The cluster starts when the hosts are available, even if this notebook has ended. `ttl` begins then. For the
        arguments and the errors, see `start`.
        """
        check_platform()
        ttl = site_settings.read().ttl_of(ttl)
        options: dict[str, object] = {"on": saved(on), "ttl": ttl, "named": name is not None}
        options |= {"spares": on.spares} if on.spares else {}
        entry = submit_to_hosts(name or made_up_name(), on, ttl, options)
        return ClusterList([entry])

    @classmethod
    def attach(cls, name: str, *, take: bool = False) -> Cluster:
        """Connect to a running cluster. Show the output of its running cell that this notebook has missed.

        If the cluster was submitted, `attach` waits until it runs. An interrupt ends only the wait, and the cluster
        stays in the queue. take: attach even if another notebook uses the cluster. Raises ClusterNotFound, with the
        names of the running clusters, and ClusterError if another notebook uses the cluster. (If two notebooks sent
        cells at once, ranks could deadlock.)
        """
        found = registry.running(name)
        if found.is_attached() and found.kernel.pid != os.getpid() and not take:
            raise ClusterError(
                f"Another notebook uses the cluster {name!r}.",
                numbers=f"its kernel is pid {found.kernel.pid}",
                hint=f"shut that kernel down; or take the cluster over: %cluster attach {name} --take",
            )
        if _current is not None and is_current(name):
            _current.connection.close("the cluster was attached anew")
        entry = replace(found, kernel=Process.of(os.getpid()))
        registry.save(entry)
        notes: tuple[str, ...] = ()
        if entry.ranks:
            client = connect(entry)
            client.wait_for(entry.n, 1.0)
        elif entry.is_spread:
            entry, client, notes = reach_on_hosts(entry)
        else:  # the notebook that started it died before the ranks were there
            entry, client = with_all_ranks(entry)
        connection = Connection(entry, client)
        cluster = cls(Started(connection, None if entry.is_spread else pinning_of(connection.entry), notes=notes))
        connection.take_up(display.here())
        return cluster

    def resize(self, n: int, *, strategy: str = "") -> ControlResult:
        """Change the number of ranks to `n`.

        While a Trainer trains, this happens between two steps. The global batch stays the same. strategy: the new
        strategy; default: tp, pp and cp keep their degrees, and only dp changes.

        New ranks receive the Trainer and the values that are equal on all ranks. Removed ranks lose their values.
        Raises UsageError for more ranks than devices, or for several hosts. Raises StrategyError or TrainingError if
        the training cannot continue with `n` ranks. Then nothing has changed, and the error says what would fit.
        """
        self.connection.check_open()
        if self.pinning is None:
            raise UsageError(
                "A cluster on several hosts keeps its number of ranks.",
                numbers=f"{self.entry.n} ranks; resize works on one host",
                hint="trainer.save(path), %cluster start with another -n, trainer.load(path)",
            )
        if n == self.entry.n:
            raise UsageError("The cluster has so many ranks already.", numbers=f"{n} ranks", hint="%cluster status")
        pinning = resized_pins(site_settings.read(), read_machine(), pinning_of(self.entry), n)
        pins = [pin.saved for pin in pinning.pins]
        result = self.training.ask("resize", ranks=n, strategy=strategy, pins=pins)
        deadline = time.monotonic() + REACH_SECONDS
        while self.entry.n != n:  # the ranks' parent writes it when all go on
            self.connection.check_open()
            if time.monotonic() > deadline:
                raise ClusterError(
                    "The parent of the ranks has not written the new number of ranks.",
                    numbers=f"waited {REACH_SECONDS:.0f} s; {self.entry.folder}",
                    hint="%cluster status",
                )
            self.connection.client.soon(self.connection.read_size)
            time.sleep(0.02)
        self.pinning, client = pinning, self.connection.client
        if self.connection.busy() is None:  # messages to a rank that is not connected yet are lost
            client.reach(range(n), REACH_SECONDS, self.entry.parent.is_alive)
        else:
            client.listen_to(range(n), REACH_SECONDS)
        return result

    @staticmethod
    def list() -> ClusterList:
        """Return every cluster of this user on this machine."""
        return ClusterList(registry.entries(), registry.unreadable())

    def stop(self) -> None:
        """End the cluster: its ranks and its controller, and no other process.

        Raises ClusterError if another notebook has taken over the cluster.
        """
        self.connection.check_ours()
        waiting, self.before_stop = self.before_stop, []
        try:
            for callback in waiting:
                callback()
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self.connection.close()
        finally:
            registry.end(self.entry)

    def restart(self) -> Cluster:
        """End all ranks and start them again with the same name, devices and ids. Their variables are lost."""
        self.connection.check_ours()
        with suppress(OSError):  # a rank may have gone to a spare
            self.pinning = self.pinning and pinning_of(self.entry)
        self._end()
        entry, options = self.entry, self.entry.options
        if self.pinning is None:
            self._use(launched_on_hosts(entry.name, loaded(options["on"]), entry.ttl, options))
        else:
            self._use(launched(entry.name, self.pinning, entry.ttl, options))
        return self

    # Cells --------------------------------------------------------------------------------------------------------

    def run(
        self,
        cell: str,
        ranks: Sequence[int] | str | None = None,
        timeout: str | float | None = None,
        detach: bool = False,
        *,
        at_step: bool = False,
        queue: bool = False,
        tabs: bool = False,
    ) -> Any:
        """Run the source text of a cell on the ranks, show output as soon as it is printed, and return Results.

        ranks: numbers of ranks, such as "0,2-3"; None (the default): all. timeout: seconds, or "30s", after which the
        cell is stopped. detach: do not wait, and return a CellHandle. at_step: run at the next step boundary of the
        running training, on all ranks. queue: wait for a running cell instead of raising CellRunning. tabs: in a
        notebook, show each rank's output in its own tab. Raises CellError with the error of the rank that failed first,
        CellRunning or UsageError.
        """
        timeout = seconds_given(timeout)
        while queue and self.connection.busy():
            time.sleep(0.02)
        for _ in until_training(self.connection) if at_step else ():
            time.sleep(0.05)
        request = request_for(self.connection, cell, ranks, at_step=at_step, detached=detach)
        note = "" if at_step else self.connection.ensure_world()
        execution = self._send(request, note, at_step=at_step, tabs=tabs)
        if detach:
            return CellHandle(self.connection, execution, timeout)
        return wait_here(self.connection, execution, timeout)

    async def run_async(
        self,
        cell: str,
        ranks: Sequence[int] | str | None = None,
        timeout: str | float | None = None,
        detach: bool = False,
        *,
        at_step: bool = False,
        queue: bool = False,
        tabs: bool = False,
    ) -> Any:
        """Do the same as `run`, as a coroutine. While it waits, the notebook's kernel still answers widgets."""
        timeout = seconds_given(timeout)
        while queue and self.connection.busy():
            await asyncio.sleep(0.02)
        for _ in until_training(self.connection) if at_step else ():
            await asyncio.sleep(0.05)
        request = request_for(self.connection, cell, ranks, at_step=at_step, detached=detach)
        # In a thread, because a new generation may take long to form, and the stop button needs the event loop.
        spoilt = self.connection.generation.spoilt and not at_step
        note = await asyncio.to_thread(self.connection.ensure_world) if spoilt else ""
        execution = self._send(request, note, at_step=at_step, tabs=tabs)
        if detach:
            return CellHandle(self.connection, execution, timeout)
        return await wait_async(self.connection, execution, timeout)

    def _again(self, request: CellRequest, screen: display.Screen) -> Execution:
        """Send a cell again whose ranks are gone. Nobody waits for it, and `screen` gets its output."""
        new = request_for(self.connection, request.source, request.ranks, detached=True)
        return self._send(replace(new, number=request.number), "", at_step=False, tabs=False, screen=screen)

    def _send(
        self, request: CellRequest, note: str, *, at_step: bool, tabs: bool, screen: display.Screen | None = None
    ) -> Execution:
        screen = screen or display.here()
        if tabs and isinstance(screen, display.KernelScreen):
            screen = RankTabs(screen.kernel, request.ranks, self.connection.client.later)
        execution = self.connection.send(request, screen, note, live=at_step)
        self.sent.append(SentCell(request, at_step, execution.done))
        for observe in () if at_step else _observers:
            observe(self, execution)
        return execution

    def wait(self, timeout: str | float | None = None) -> Results | None:
        """Wait for the end of the running cell. Raises what the cell raised.

        The stop button ends only the wait, not the cell. timeout: seconds, or "30s", after which the wait ends with
        TimeoutError. The cell continues.
        """
        busy = self.connection.busy()
        return wait_for(self.connection, busy, timeout) if busy else None

    def switch(self, strategy: str) -> ControlResult:
        """Change the strategy, also while a training runs. `cluster.training` has more controls."""
        return self.training.switch(strategy)

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> TraceFile:
        """Record the next steps of the running training, and return one file for Perfetto with all ranks."""
        return self.training.trace(steps, path)

    # Values -------------------------------------------------------------------------------------------------------

    def push(self, values: dict[str, Any], ranks: Sequence[int] | str | None = None, *, force: bool = False) -> None:
        """Assign values by name on the ranks. Raises TransferError above 1 GB without `force`, CellRunning or
        CellError."""
        self.connection.check_open()
        self.connection.check_idle("push")
        chosen = chosen_ranks(ranks, self.entry.n)
        self.connection.check_alive(chosen)
        # Record the values before they are sent: the notebook may change them at once.
        sent = SentValues.of(notebook_number(), chosen, values)
        push(self.connection.client, values, chosen, force=force, shared=not self.entry.is_spread)
        self.sent.append(sent)

    def pull(self, name: str, ranks: Sequence[int] | str | int | None = 0, *, force: bool = False) -> Any:
        """Return the value of a name or expression on one rank. For several ranks, or None (all), return a list."""
        self.connection.check_open()
        self.connection.check_idle("pull")
        chosen = chosen_ranks(ranks, self.entry.n)
        self.connection.check_alive(chosen)
        values = pull(self.connection.client, name, chosen, force=force, shared=not self.entry.is_spread)
        return values[0] if isinstance(ranks, int) else values

    def sync(self, path: str | os.PathLike[str] = ".") -> Synced:
        """Copy the files of a folder in the notebook's directory to hosts that do not share this directory.

        `import` finds them there. `sync` leaves out unchanged files and files that .gitignore excludes. Raises
        UsageError if there is nothing to copy, or too much.
        """
        self.connection.check_open()
        self.connection.check_idle("sync")
        self.connection.check_alive(range(self.entry.n))
        return sync(self.connection.client, self.entry.hosts, project_at(path, Path.cwd()))

    # What it knows ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return a table of the ranks: pid, device, memory, state, current cell, age."""
        answers = self.connection.client.ask(range(self.entry.n), GetStatus())
        entry = repinned(self.entry)
        rows = rank_rows(entry, answers, self.connection.deaths)
        return Status(entry, rows, self.connection.generation.number, self.notes)

    def why(self, *, stacks: bool = False) -> Why:
        """Return what every rank does, and one sentence that names the stuck rank and its place in the code.

        It takes at most 5 s. stacks: include the stack of every thread.
        """
        self.connection.check_open()
        return ask_why(self.entry, self.connection.client, self.connection.deaths, stacks=stacks)

    def debug(self, rank: int | None = None) -> None:
        """Open a pdb prompt on a rank. It reads commands with `input()` until the user leaves it.

        If a cell waits at a `breakpoint()`, the prompt is at that line. Otherwise it shows the frames of the cell that
        failed last. rank: the rank to debug; default: the first rank that waits or has failed. Raises UsageError if no
        rank waits or has failed, or if nobody can type here.
        """
        self.connection.check_open()
        debug(self.connection, rank)

    def __repr__(self) -> str:
        state = "stopped" if self.ended else f"{self.entry.n} ranks over {self.entry.backend}"
        return f"<Cluster {self.entry.name}: {state}>"

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except (NbkitError, OSError):
            return f"<code>{self!r}</code>"
