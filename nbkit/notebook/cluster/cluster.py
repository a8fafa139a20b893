"""The cluster as a user has it: start, run, stop. Every magic is one call of this.

cluster = Cluster.start(n=4, name="lesson")
cluster.run("x = torch.ones(1) * rank; dist.all_reduce(x); x")
cluster.stop()
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nbkit.errors import ClusterError, ClusterExists, NbkitError
from nbkit.notebook.cluster import presence, registry, site
from nbkit.notebook.cluster.cells import submit
from nbkit.notebook.cluster.cells.dispatcher import Post
from nbkit.notebook.cluster.cells.execution import Running
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cells.wait import until_training, wait_async, wait_for, wait_here
from nbkit.notebook.cluster.control_result import Verdict
from nbkit.notebook.cluster.launch.launch import connect, launch, pinning_of
from nbkit.notebook.cluster.launch.limits import pins_within
from nbkit.notebook.cluster.launch.pinning import Pinning
from nbkit.notebook.cluster.launch.platform_check import check_platform
from nbkit.notebook.cluster.naming import chosen_ranks, made_up_name, names_of_notebook
from nbkit.notebook.cluster.output import display
from nbkit.notebook.cluster.registry import Entry, Process
from nbkit.notebook.cluster.status import ClusterList, Status, rank_rows
from nbkit.notebook.cluster.training_control import Training
from nbkit.notebook.cluster.transfer import pull, push
from nbkit.notebook.cluster.world_generation import Generation
from nbkit.notebook.tracing import Traced
from nbkit.wire.cells import CellRequest

_current: Cluster | None = None


def current() -> Cluster:
    """The cluster that cells of this notebook run on. Raises ClusterError if there is none."""
    if _current is None or _current.ended:
        raise ClusterError(
            "This notebook has no cluster.",
            numbers=f"running: {', '.join(e.name for e in registry.entries() if e.is_alive()) or 'none'}",
            hint="%cluster start -n 2   or   %cluster attach NAME",
        )
    return _current


def is_current(name: str) -> bool:
    """Whether this notebook's cluster is called `name`."""
    return _current is not None and not _current.ended and _current.entry.name == name


class Cluster:
    """A running cluster. Made by `start` or `attach`, never directly."""

    def __init__(self) -> None:
        self.post = Post()
        self.generation = Generation(self)
        self.training = Training(self)  # switch, undo, try, pause, save, stop
        self.ended = False
        self.numbers = itertools.count(1)
        self.entry: Entry
        self.notes: tuple[str, ...] = ()
        self.started_in = 0.0  # seconds from nothing to ready; 0 for an attached cluster

    # Life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        n: int | None = None,
        *,
        name: str | None = None,
        gpus: str | None = None,
        cpu: bool = False,
        ttl: float | None = None,
    ) -> Cluster:
        """Start a cluster on this machine and make it the notebook's.

        n: ranks; default one per idle GPU, one where others use GPUs, two without a GPU. gpus: "2,3" to choose. ttl:
        seconds without a notebook and without a running cell after which it lets go of its devices (two hours, unless
        nbkit.toml says otherwise). Returns when every rank has answered and the process group has done an all-reduce.
        Raises ClusterError, ClusterExists or UsageError, with nothing left running.
        """
        check_platform()
        settings = site.read()
        ttl = settings.ttl_of(ttl)
        options: dict[str, object] = {"n": n, "gpus": gpus, "cpu": cpu, "ttl": ttl, "named": name is not None}
        if name is None and _current is not None and (again := _current._taken_again(options)):
            return again
        self = cls()
        pinning = pins_within(settings, n, gpus, cpu=cpu)
        self._launch(name or made_up_name(), pinning, ttl, options)
        return self

    def _launch(self, name: str, pinning: Pinning, ttl: float, options: dict[str, object]) -> None:
        self.post, self.generation, self.pinning = Post(), Generation(self), pinning
        began = time.monotonic()
        self.entry, self.post.wire = launch(name, pinning, ttl, options, self.post.on_message, self._on_gone)
        self.started_in = time.monotonic() - began
        self.notes = pinning.notes
        if pinning.pins[0].kind == "gpu":
            self.notes += ("LOCAL_RANK is 0 on every rank: each sees its own GPU alone, as cuda:0.",)
        self._adopt()

    def _taken_again(self, options: dict[str, object]) -> Cluster | None:
        """This nameless cluster, if its cell is run once more; a second one would only hold devices. None: it is gone.

        Raises ClusterExists if it was started with other options.
        """
        if self.ended or self.post.deaths or self.entry.options.get("named") or not self.entry.is_alive():
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
    def attach(cls, name: str, *, take: bool = False) -> Cluster:
        """Take up a running cluster, with the output of its running cell that this notebook has missed.

        take: even from another notebook that is using it. Raises ClusterNotFound, naming the clusters that do run,
        and ClusterError if another notebook uses it: two that send cells at once would have ranks wait for each other.
        """
        self = cls()
        found = registry.running(name)
        if found.is_attached() and found.kernel.pid != os.getpid() and not take:
            raise ClusterError(
                f"Another notebook uses the cluster {name!r}.",
                numbers=f"its kernel is pid {found.kernel.pid}",
                hint=f"shut that kernel down; or take the cluster over: %cluster attach {name} --take",
            )
        if _current is not None and not _current.ended and _current.entry.name == name:
            _current.post.close()
        self.entry = replace(found, kernel=Process.of(os.getpid()))
        self.pinning = pinning_of(self.entry)
        self.post.wire = connect(self.entry, self.post.on_message, self._on_gone)
        registry.save(self.entry)
        self.post.wire.wait_for(self.entry.n, 1.0)
        self._adopt()
        self.post.read_deaths(self.entry.folder)
        alive = [rank for rank in self.post.wire.ranks if rank not in self.post.deaths]
        self.post.wire.listen_to(alive, 5.0)
        states = self.post.wire.ask(alive, "status")
        self.post.request_number = max((state["requests"] for state in states.values()), default=0)
        self.generation.learn(states)
        held = next((s for s in states.values() if s["cell"]), None)
        held = held or next((s["undelivered"] for s in states.values() if s["undelivered"]), None)
        if held:
            request = CellRequest(held["cell"], held["source"], held["number"], tuple(held["ranks"]))
            self.post.follow(Running(request, display.here(), self.post.wire.later, names_of_notebook))
        return self

    def _adopt(self) -> None:
        global _current
        _current = self
        self.ended = False
        self.post.on_death = self._after_death
        self.post.keep_in_touch(min(60.0, self.entry.ttl / 4))
        self.post.watch(partial(presence.why_gone, self), self.entry.folder)

    @staticmethod
    def list() -> ClusterList:
        """Every cluster of this user on this machine."""
        return ClusterList(registry.entries(), registry.unreadable())

    def stop(self) -> None:
        """End the cluster: its ranks, its controller, and nothing else."""
        self.ended = True
        try:
            self.post.close()
        finally:
            registry.end(self.entry)

    def restart(self) -> Cluster:
        """End every rank and start again: same name, same pins, same ids; variables are lost."""
        self.stop()
        self._launch(self.entry.name, self.pinning, self.entry.ttl, self.entry.options)
        return self

    # Cells --------------------------------------------------------------------------------------------------------

    def run(
        self,
        cell: str,
        ranks: Sequence[int] | str | None = None,
        timeout: float | None = None,
        detach: bool = False,
        *,
        at_step: bool = False,
        queue: bool = False,
    ) -> Any:
        """Run source text on the ranks (all, or e.g. "0,2-3") and show what they print as it comes.

        timeout: seconds after which the cell is stopped. detach: do not wait, return a CellHandle. at_step: at the
        next step boundary of the running training, on all ranks. queue: wait for a cell that runs, instead of
        refusing. Returns Results. Raises CellError (the rank that failed first), CellRunning, UsageError.
        """
        while queue and self.post.busy():
            time.sleep(0.02)
        for _ in until_training(self) if at_step else ():
            time.sleep(0.05)
        request = submit.request_for(self, cell, ranks, at_step=at_step)
        note = "" if at_step else self.generation.ensure()
        running = submit.send(self, request, note, live=at_step)
        return CellHandle(self, running, timeout) if detach else wait_here(self, running, timeout)

    async def run_async(
        self,
        cell: str,
        ranks: Sequence[int] | str | None = None,
        timeout: float | None = None,
        detach: bool = False,
        *,
        at_step: bool = False,
        queue: bool = False,
    ) -> Any:
        """`run`, to be awaited: meanwhile the notebook's kernel goes on answering widgets."""
        while queue and self.post.busy():
            await asyncio.sleep(0.02)
        for _ in until_training(self) if at_step else ():
            await asyncio.sleep(0.05)
        request = submit.request_for(self, cell, ranks, at_step=at_step)
        # In a thread, because a new generation may take long to form, and the stop button needs the event loop.
        note = await asyncio.to_thread(self.generation.ensure) if self.generation.spoilt and not at_step else ""
        running = submit.send(self, request, note, live=at_step)
        return CellHandle(self, running, timeout) if detach else await wait_async(self, running, timeout)

    def wait(self, timeout: float | None = None) -> Results | None:
        """Wait for the cell that runs, as Run All must before it goes on. Raises what the cell raised.

        The stop button ends the waiting only; so does `timeout` (seconds), with a TimeoutError.
        """
        busy = self.post.busy()
        return wait_for(busy, timeout) if busy else None

    def switch(self, strategy: str) -> Verdict:
        """Train on under another strategy, also while a training runs: see Training.switch; `.training` has more."""
        return self.training.switch(strategy)

    def trace(self, steps: int = 3, path: str | os.PathLike[str] | None = None) -> Traced:
        """The next steps of the running training, all ranks in one file for Perfetto."""
        return self.training.trace(steps, path)

    # Values -------------------------------------------------------------------------------------------------------

    def push(self, values: dict[str, Any], ranks: Sequence[int] | str | None = None, *, force: bool = False) -> None:
        """Assign values on the ranks. Raises TransferError above 1 GB unless forced, CellRunning, CellError."""
        presence.must_be_here(self)
        self.post.check_idle("push")
        self.post.check_alive(chosen_ranks(ranks, self.entry.n))
        push(self, values, chosen_ranks(ranks, self.entry.n), force=force)

    def pull(self, name: str, ranks: Sequence[int] | str | int | None = 0, *, force: bool = False) -> Any:
        """The value of a name (or expression) on one rank; several ranks, or None for all, give a list."""
        presence.must_be_here(self)
        self.post.check_idle("pull")
        chosen = chosen_ranks([ranks] if isinstance(ranks, int) else ranks, self.entry.n)
        self.post.check_alive(chosen)
        values = pull(self, name, chosen, force=force)
        return values[0] if isinstance(ranks, int) else values

    # What it knows ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """A table of the ranks: pid, device, memory, state, current cell, age."""
        return Status(self.entry, rank_rows(self), self.generation.number, self.notes)

    def end_rank(self, rank: int) -> None:
        """End one rank's process at once."""
        if self.entry.is_here:
            self.entry.ranks[rank].end(9, group=True)
            return
        others = [other for other in range(self.entry.n) if other != rank]
        self.post.wire.request(others, "end", rank=rank)  # one that answers is enough

    def _on_gone(self, rank: int) -> None:
        self.post.on_gone(rank, self.entry.folder)

    def _after_death(self, rank: int, how: str) -> None:
        self.generation.spoil(f"rank {rank} died")

    def __repr__(self) -> str:
        state = "stopped" if self.ended else f"{self.entry.n} ranks over {self.entry.backend}"
        return f"<Cluster {self.entry.name}: {state}>"

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except (NbkitError, OSError):
            return f"<code>{self!r}</code>"
