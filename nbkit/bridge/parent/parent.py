"""The parent of the ranks: it imports torch once, forks every rank from itself, reaps them, and ends with the last one.

    python -m nbkit.bridge.parent.parent FOLDER

The parent stays when the notebook is gone. It has no zmq socket and no thread, so that it can fork at any time. It does
five things:

- It says how a rank ended.
- It releases the ranks of a cell in which one rank failed.
- It replaces a rank that died in a training (replacement.py).
- It ends a rank that does not answer at all, when a notebook asks for that.
- It ends the cluster when the controller is gone, or when nobody has used it for its time to live.

A cluster on several hosts has a parent on each host. Each parent passes messages between its ranks and the coordinator.
The coordinator decides when to end. The first host's parent decides which ranks are replaced (other_hosts.py).

`EndInOrder` ends the ranks of a host when somebody other than the user asks for it. A training is first saved at its
next step boundary. Batch systems send SIGTERM before they kill: at a job's time limit, or to make room for another job.
Some send it twice. In a cluster on several hosts, the parent tells the coordinator, which knows more about the reason
and tells the other hosts.

`Spares` are the devices in reserve. A rank moves to one of them if its own device may be broken: if the rank has said
that its device does not compute any more, or if the rank has died twice on it in one cell. A single death is not blamed
on the device: its usual cause is a kill, a lack of memory, or the program. A device that a rank has left is never used
again. Each host has its own spares, which the parent there assigns.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nbkit.bridge.parent import spec as specs
from nbkit.bridge.parent.child_processes import Ends, has_ended, kill_group, log, start_afresh
from nbkit.bridge.parent.other_hosts import CoordinatorLine, OtherHosts, RankElsewhere
from nbkit.bridge.parent.replacement import Replacer, Resizer
from nbkit.bridge.parent.spec import write_pins
from nbkit.private_symbols import LACKING
from nbkit.rank.telemetry.sinks import CLOSE_SECONDS
from nbkit.rank.world.rank_place import open_listener
from nbkit.wire import cluster_end, interrupts
from nbkit.wire.link import Link
from nbkit.wire.messages import (
    CellBegan,
    CellEnded,
    CellFailed,
    CloseSinks,
    Death,
    DeviceFailed,
    EndNow,
    EndOfCluster,
    EndRank,
    EndTraining,
    FitEntered,
    FitLeft,
    ForParent,
    ForRank,
    InterruptRank,
    InUse,
    RankEnd,
    RankIsDead,
    RankPlaced,
    RankReady,
    RankStarted,
    ReadyToForm,
    ReleaseCell,
    ReplacementNoted,
    SinksOpened,
    ToldToEnd,
    TrainingEnded,
    TrainingGoesOn,
    WaitsForOthers,
    deliver,
    handlers_of,
    handles,
)
from nbkit.wire.processes import STOP_SIGNAL, Process, followers, node_name
from nbkit.wire.user_code import look_in


def controller_of(folder: Path) -> Process | None:
    """Return the controller of the cluster in `folder`; None until the notebook has started and announced it."""
    try:
        return Process(**json.loads((folder / "controller.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return None


def end_schedulers(folder: Path, controller: Process | None) -> None:
    """End the schedulers of a controller that was killed. A living controller ends its schedulers itself."""
    if controller and not controller.is_alive():
        for scheduler in followers(controller.pid, folder):
            scheduler.end(signal.SIGKILL)


def unregister(engine_file: Path, rank: int) -> None:
    """Unregister engine `rank` from the hub, so that the hub tells its clients, and the id is free again.

    The nanny process of ipyparallel would do the same, but nbkit does not start it. Call this in a separate process,
    since the parent must not use zmq.
    """
    import zmq
    from jupyter_client.session import Session

    info = json.loads(engine_file.read_text())
    session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
    context = zmq.Context()  # type: ignore[attr-defined]
    socket = context.socket(zmq.DEALER)  # type: ignore[attr-defined]
    socket.LINGER = 3000
    if server := info.get("curve_serverkey"):
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"{info['interface']}:{info['registration']}")
    session.send(socket, "unregistration_request", content={"id": rank})
    socket.close()
    context.term()


END_SECONDS = 600.0  # for a training to reach a step boundary and be saved; a sender of SIGTERM waits less


class EndInOrder:
    """Ends the ranks in order. There is one per parent.

    asked: True after SIGTERM. The signal handler does nothing else, so the signal may come at any time.
    """

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.asked, self.why, self.deadline = False, "", float("inf")

    def go_on(self) -> None:
        """Begin the end that a signal has asked for. End all ranks at once if that takes too long."""
        if self.asked:
            self.asked = False  # if a second signal comes, the end has already begun
            if self.parent.coordinator:
                self.parent.coordinator.link.send(ToldToEnd())
            if not self.parent.ending:
                self.begin("the cluster was told to end (SIGTERM)")
        if time.monotonic() > self.deadline:
            self.deadline = float("inf")
            self.parent.end_all("the training did not end in time")

    def begin(self, why: str, *, now: bool = True) -> None:
        """End every rank. A training is saved at its next step boundary, and then its ranks end.

        If no rank runs a cell, all end at once. now: do not wait for cells that do not train.
        """
        parent = self.parent
        if parent.ending and not self.why:  # the ranks are already being ended at once
            return
        if not parent.ending and not any(child.cells for child in parent.children.values()):
            parent.end_all(why)
            return
        parent.ending = True
        if now:
            self.deadline = min(self.deadline, time.monotonic() + END_SECONDS)
        self.tell(why, now=now)

    def tell(self, why: str, *, now: bool) -> None:
        """Tell the ranks to end, once for each reason. now: a rank that does not train ends at once."""
        if why != self.why:
            self.why = why
            log(f"a training is to end in order: {why}")
            for child in self.parent.children.values():
                child.link.send(EndOfCluster(why, now))


DEATHS = 2  # after this number of deaths of one rank on one device in one cell, the device may be the cause


class Spares:
    """The devices in reserve for the ranks of a host. There is one per parent."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self._pids: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)  # (cell, rank, device) -> dead pids

    def place(self, cell: str, death: Death) -> str:
        """Choose the device of the process that replaces a dead rank. Returns a sentence about a change, or "".

        Called again with the same death if the replacing process fails too. On several hosts the coordinator is also
        told, for the first host's parent and for the notebook.
        """
        said = self._placed(cell, death)
        line, spec = self.parent.coordinator, self.parent.spec
        if said:
            log(said)
        if said and line:
            pin, left = spec.pin(death.rank), tuple(spare.label for spare in spec.spares)
            line.link.send(RankPlaced(death.rank, said, pin.label, pin.why, left))
        return said

    def _placed(self, cell: str, death: Death) -> str:
        spec, rank = self.parent.spec, death.rank
        if not spec.spares and not spec.retired:
            return ""
        old = spec.pin(rank)
        died = self._pids[cell, rank, old.label]
        died.add(death.pid)
        if not death.failed and len(died) < DEATHS:
            return ""
        why = f"{old.label} failed" if death.failed else f"it died {_times(len(died))} on {old.label}"
        if not spec.spares:
            return f"rank {rank} stays on {old.label}, though {why}: no spare is left{self._where()}"
        new, *left = spec.spares
        said = f"rank {rank} is on the spare {new.label} now, since {why}; {_counted(len(left))} left{self._where()}"
        new = replace(new, why=f"{new.why}; since {time.strftime('%H:%M:%S')}, for {why}")
        pins = list(spec.pins)
        pins[rank - spec.base] = new
        self.parent.spec = replace(spec, pins=tuple(pins), spares=tuple(left), retired=(*spec.retired, old))
        write_pins(self.parent.spec, self.parent.folder / "spec.json")
        return said

    def _where(self) -> str:
        return f" on {node_name()}" if self.parent.coordinator else ""


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _counted(count: int) -> str:
    return "no spare is" if not count else "1 spare is" if count == 1 else f"{count} spares are"


START_SECONDS = 180.0  # for the controller to write its address; the notebook waits as long
GRACE_SECONDS = 0.25  # the other ranks of a failed cell have this time to end by themselves
TICK_SECONDS = 1.0
FAILED_KEPT = 50  # number of cells; a few are enough, since all ranks begin a cell at nearly the same time
_COORDINATOR = "coordinator"  # key of its socket in the selector; the other keys are ranks


@dataclass
class Child:
    """A rank as its parent sees it.

    fit: the `fit` that it runs, and where a new rank can enter. replaces: True for a new rank of an existing world.
    dismissed: True if the parent has ended it, so its end is not a death. failed: the error of its device, if that
    does not compute any more. has_sinks: True if a training in it has sinks of the user, to close before it ends.
    """

    rank: int
    pid: int
    link: Link[ForRank, ForParent]
    ready: bool = False
    replaces: bool = False
    dismissed: bool = False
    failed: str = ""
    has_sinks: bool = False
    fit: FitEntered | None = None
    cells: dict[str, tuple[int, ...]] = field(default_factory=dict)  # running cells: id -> its ranks

    def dismiss(self) -> None:
        """End the rank, without declaring it dead."""
        self.dismissed = True
        kill_group(self.pid)


class Parent:
    """The parent of the ranks of one host. See the docstring of the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = specs.read(folder / "spec.json")
        line = self.spec.line
        self.coordinator = CoordinatorLine(line) if line else None
        self.listener = None if line else open_listener()
        if self.listener:
            self.spec = replace(self.spec, port=self.listener.getsockname()[1])
        self.children: dict[int, Child] = {}
        self.dead: set[int] = set()
        self.replacer, self.resizer, self.spares = Replacer(self), Resizer(self), Spares(self)
        self.elsewhere = OtherHosts(self)
        self.due: dict[str, tuple[float, str]] = {}  # cell -> (when to release it, why)
        self.failed: dict[str, str] = {}  # newest cells in which a rank has failed -> why the others are released
        self.seen = time.monotonic()
        self.ends = Ends()
        self.selector = selectors.DefaultSelector()
        self.ending = self.stop_asked = False
        self.kill_at = float("inf")  # when to end ranks that are still closing their sinks
        self.end_in_order = EndInOrder(self)
        self.messengers: list[int] = []
        self.controller: Process | None = None

    def run(self) -> None:
        """Start the ranks, and handle events until every rank has ended."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(STOP_SIGNAL, self._on_stop)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self.end_in_order, "asked", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.selector.register(woken, selectors.EVENT_READ, None)
        if self.coordinator:
            self.selector.register(self.coordinator.link.sock, selectors.EVENT_READ, _COORDINATOR)
        for rank in self.spec.ranks:
            if self.ending or self.end_in_order.asked:
                break
            self.start_rank(rank)
        if self.listener:
            self.listener.close()
        if self.ending or self.end_in_order.asked:  # the signal may have come during a fork
            self.end_all("the cluster was stopped while it started")
        while self.children or self.elsewhere.awaited:
            for key, _ in self.selector.select(self._patience()):
                if key.data is None:
                    woken.recv(4096)
                elif key.data == _COORDINATOR:
                    self._hear_coordinator()
                else:
                    self._hear(self.children.get(key.data))
            if self.stop_asked:
                self.stop_asked = False
                self.end_all("the cluster was stopped")
            self.end_in_order.go_on()
            self._reap()
            self._kill_when_closed()
            self._release_due()
            self.elsewhere.go_on()
            self.replacer.go_on()
            self.resizer.go_on()
            self._end_if_unused()
        log("every rank has ended")

    def start_rank(self, rank: int, *, replaces: bool = False) -> None:
        """Fork a rank from this process, which has torch in memory. If forking is unsafe, start a new process.

        replaces: another rank of this number has died, or the other ranks already have a world without this one.
        """
        mine, theirs = socket.socketpair()
        listener = self.listener if rank == 0 and not replaces else None
        if self.spec.forked:
            pid = os.fork()
            if pid == 0:
                mine.close()
                self._become(rank, theirs, listener, replaces)
        else:
            pid = start_afresh(self.folder, self.spec.port, rank, theirs, listener, replaces=replaces)
        theirs.close()
        child = self.children[rank] = Child(rank, pid, Link(mine), replaces=replaces)
        self.selector.register(mine, selectors.EVENT_READ, rank)
        log(f"rank {rank} is pid {child.pid}")
        self.elsewhere.tell(RankStarted(rank, child.pid))

    @property
    def members(self) -> dict[int, Child | RankElsewhere]:
        """Return the ranks that may take part in a training and that this parent handles."""
        return {**self.children, **self.elsewhere.ranks}

    def _become(self, rank: int, theirs: socket.socket, listener: socket.socket | None, replaces: bool) -> None:
        """Drop what belongs to the parent, then be a rank. Runs in the forked child, and never returns."""
        try:
            os.setsid()  # processes that this rank starts can then be ended with it
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, STOP_SIGNAL):
                signal.signal(number, signal.SIG_DFL)
            self.selector.close()
            for child in self.children.values():
                child.link.sock.close()
            if listener is None and self.listener:
                self.listener.close()
            if self.coordinator:
                self.coordinator.link.sock.close()
            from nbkit.bridge import engine

            engine.main(self.spec, rank, listener, Link(theirs), replaces=replaces)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _hear(self, child: Child | None) -> None:
        if child is None:
            return
        if (messages := child.link.receive()) is None:
            self.selector.unregister(child.link.sock)
            if child.link.refused:
                log(f"rank {child.rank} is ended: {child.link.refused}")
                kill_group(child.pid)
            return
        for message in messages:
            deliver(message, self, child)

    # Messages of a rank

    @handles(RankReady)
    def _on_ready(self, _: RankReady, child: Child) -> None:
        child.ready = True

    @handles(SinksOpened)
    def _on_sinks(self, _: SinksOpened, child: Child) -> None:
        child.has_sinks = True

    @handles(InUse)
    def _on_use(self, _: InUse, __: Child) -> None:
        self.seen = time.monotonic()

    @handles(CellBegan)
    def _on_cell_began(self, began: CellBegan, child: Child) -> None:
        self.seen = time.monotonic()
        child.cells[began.cell] = began.ranks
        # The cell was on its way when the rank died. Nothing else would end the wait for the dead rank.
        for rank in self.dead.intersection(began.ranks):
            child.link.send(ReleaseCell(began.cell, f"rank {rank} died"))
        # Another rank failed in the cell before this rank began it, so this rank was not released then.
        if began.cell in self.failed:
            child.link.send(ReleaseCell(began.cell, self.failed[began.cell]))

    @handles(CellEnded)
    def _on_cell_ended(self, ended: CellEnded, child: Child) -> None:
        self.seen = time.monotonic()
        child.cells.pop(ended.cell, None)
        if child.fit and child.fit.cell == ended.cell:
            self.replacer.leave(child)
        self.elsewhere.tell_left(child)
        if ended.status == "error":
            self._release_soon(ended.cell, child.rank)
            if self.coordinator:
                self.coordinator.link.send(CellFailed(ended.cell, child.rank))

    @handles(DeviceFailed)
    def _on_device_failed(self, failed: DeviceFailed, child: Child) -> None:
        child.failed = failed.said

    @handles(TrainingEnded)
    def _on_training_ended(self, ended: TrainingEnded, child: Child) -> None:
        if self.coordinator and child.rank == self.spec.base:  # all ranks of a host say the same
            self.coordinator.link.send(ended)

    @handles(ReadyToForm, TrainingGoesOn)
    def _on_ready_to_form(self, message: ForParent, child: Child) -> None:
        if not self.resizer.takes(child, message):
            self.elsewhere.tell_said(child, message)

    @handles(FitEntered, FitLeft, WaitsForOthers)
    def _on_training(self, message: ForParent, child: Child) -> None:
        self.elsewhere.tell_said(child, message)

    @handles(InterruptRank)
    def _on_interrupt(self, message: InterruptRank, sender: Child | None = None) -> None:
        if child := self.children.get(message.rank):
            interrupts.send(self.folder / "output", child.rank, message.cell, partial(os.kill, child.pid))
        elif sender and self.coordinator and message.rank not in self.spec.ranks:
            self.coordinator.link.send(message)

    @handles(EndRank)
    def _on_end_rank(self, message: EndRank, sender: Child | None = None) -> None:
        if child := self.children.get(message.rank):
            log(f"rank {child.rank} answers to nothing and is ended on request")
            kill_group(child.pid)
        elif sender and self.coordinator and message.rank not in self.spec.ranks:
            self.coordinator.link.send(message)

    def _hear_coordinator(self) -> None:
        assert self.coordinator is not None
        for message in self.coordinator.receive():
            about_ranks = type(message) in handlers_of(OtherHosts)
            deliver(message, self.elsewhere if about_ranks else self)
        if self.coordinator.gone:
            self.selector.unregister(self.coordinator.link.sock)
            log("the line to the coordinator is closed")
            if self.coordinator.link.broke:  # nobody else can reach the ranks any more and end their waits
                for child in self.children.values():
                    for cell in child.cells:
                        child.link.send(ReleaseCell(cell, "the notebook's host does not answer"))
            elif not self.ending:  # the coordinator was killed
                self.end_in_order.begin("the coordinator of the cluster has ended", now=False)

    # Messages of the coordinator. OtherHosts has more.

    @handles(CellFailed)
    def _on_cell_failed(self, failed: CellFailed) -> None:
        self._release_soon(failed.cell, failed.rank)

    @handles(RankIsDead)
    def _on_rank_is_dead(self, message: RankIsDead) -> None:
        death = message.death
        self.dead.add(death.rank)
        self.elsewhere.forget(death.rank, death.how)
        if message.unregister:
            self.tell_hub(death.rank)
        self.spread_death(death)

    @handles(EndTraining)
    def _on_end_training(self, message: EndTraining) -> None:
        for child in self.children.values():
            child.link.send(message)

    @handles(EndOfCluster)
    def _on_end_of_cluster(self, message: EndOfCluster) -> None:
        self.end_in_order.begin(message.why, now=message.now)

    @handles(EndNow)
    def _on_end_now(self, message: EndNow) -> None:
        self.end_all(message.why)

    def _release_soon(self, cell: str, failed: int) -> None:
        if cell not in self.due:
            self.due[cell] = (time.monotonic() + GRACE_SECONDS, f"rank {failed} failed")

    def _release_due(self) -> None:
        now = time.monotonic()
        for cell, (when, why) in list(self.due.items()):
            waiting = [child for child in self.children.values() if cell in child.cells]
            if now >= when or not waiting:
                del self.due[cell]
                self.failed[cell] = why
                if len(self.failed) > FAILED_KEPT:
                    self.failed.pop(next(iter(self.failed)))
                for child in waiting:
                    child.link.send(ReleaseCell(cell, why))

    def _reap(self) -> None:
        for child in list(self.children.values()):
            if not has_ended(child.pid):
                continue
            kill_group(child.pid)  # its process group includes DataLoader workers and commands that it has started
            del self.children[child.rank]
            _, status = os.waitpid(child.pid, 0)
            self._close(child)
            how = self.ends.how(status, child.failed)
            log(f"rank {child.rank} (pid {child.pid}) ended: {how}")
            if not self.ending and not child.dismissed:
                self._tell_dead(child, how)
        self.messengers = [pid for pid in self.messengers if os.waitpid(pid, os.WNOHANG)[0] == 0]

    def _close(self, child: Child) -> None:
        """Read the last messages of a rank that has ended, such as that it has begun a cell."""
        if child.link.sock in self.selector.get_map():
            self.selector.unregister(child.link.sock)
        child.link.sock.setblocking(False)
        while (messages := child.link.receive()) is not None:
            for message in messages:
                deliver(message, self, child)
        child.link.sock.close()

    def _tell_dead(self, child: Child, how: str) -> None:
        """Handle the unexpected end of a rank: have it replaced, or report its death and release waiting ranks."""
        death = Death(child.rank, how, time.time(), child.pid, tuple(sorted(child.cells)), child.failed)
        self.resizer.give_up(f"rank {child.rank} died ({how})", gone=child)
        death = self.replacer.explained(child, death)
        if child.dismissed or (self.elsewhere.decides and self.replacer.takes(child, death)):
            return
        if not all(other.ready or other.replaces for other in (child, *self.children.values())):
            self.dead.add(child.rank)
            self.note(death)
            if self.coordinator:
                self.coordinator.tell_failed_start(child.rank, how, self.folder / "logs" / f"rank{child.rank}.log")
            self.end_all(f"rank {child.rank} ended while the cluster was starting")
        elif self.elsewhere.decides:
            self.declare_dead(death)
        else:
            self.elsewhere.tell_lost(death)

    def declare_dead(self, death: Death) -> None:
        """Tell everybody, on all hosts, that a rank is dead and is not replaced."""
        self.dead.add(death.rank)
        self.note(death)
        if self.coordinator:
            self.coordinator.link.send(RankIsDead(death))
        self.spread_death(death)
        self.tell_hub(death.rank)

    def note(self, death: Death) -> None:
        """Write the report of a death for the notebook. It is a RankEnd if the rank is replaced."""
        try:
            cluster_end.write_rank(self.folder, death)
        except OSError as error:  # a full disk must not end the cluster, and the ranks also report the death
            log(f"what is told of rank {death.rank} could not be written: {error}")
        if self.coordinator and isinstance(death, RankEnd):  # it tells the notebook; for other deaths RankIsDead does
            self.coordinator.link.send(ReplacementNoted(death))

    def spread_death(self, death: Death) -> None:
        """Tell the ranks of a death, and release those that ran a cell with the dead rank."""
        for child in self.children.values():
            child.link.send(RankIsDead(death))
            # If a host is out of reach, nobody knows which cells its ranks were in.
            shared = (cell for cell, ranks in child.cells.items() if death.rank in ranks)
            for cell in shared if death.cells is None else death.cells:
                child.link.send(ReleaseCell(cell, f"rank {death.rank} died"))

    def tell_hub(self, rank: int) -> None:
        """Tell ipyparallel's hub of a death, from a separate process. The hub would otherwise wait for heartbeats."""
        if pid := os.fork():
            self.messengers.append(pid)
            return
        try:
            signal.set_wakeup_fd(-1)
            unregister(Path(self.spec.engine_file), rank)
        finally:
            os._exit(0)

    def _end_if_unused(self) -> None:
        if self.ending:
            return
        self.controller = controller = self.controller or controller_of(self.folder)
        if in_use := any(child.cells or not child.ready for child in self.children.values()):
            self.seen = time.monotonic()
        if self.coordinator:
            self.coordinator.tell_seen(self.seen)
            if self.coordinator.gone and not any(child.cells for child in self.children.values()):
                self.end_all("the coordinator is gone")
        elif in_use:
            if controller and not controller.is_alive():
                self.end_in_order.tell("the controller of the cluster has ended", now=False)
            return
        elif controller and not controller.is_alive():
            self.end_all("the controller is gone")
        elif time.monotonic() - self.seen > self.spec.ttl:
            if controller:
                controller.end(signal.SIGTERM)
            self.end_all(f"no notebook and no cell for {self.spec.ttl:.0f} s")

    def end_all(self, why: str) -> None:
        """End every rank at once. An idle rank has nothing to save. Sinks of the user get a moment to close."""
        self.ending, self.end_in_order.deadline = True, float("inf")
        log(f"ending the ranks: {why}")
        if self.kill_at == float("inf"):
            self.kill_at = time.monotonic() + CLOSE_SECONDS
            for child in self.children.values():
                if child.has_sinks:
                    child.link.send(CloseSinks())
        self._kill_when_closed()
        end_schedulers(self.folder, self.controller)

    def _kill_when_closed(self) -> None:
        """End the ranks if the end has begun and no rank is closing its sinks any more, or if that takes too long.

        The other ranks live until then; otherwise the sinks would be told that the training has failed.
        """
        closing = any(child.has_sinks for child in self.children.values())
        if self.kill_at < float("inf") and (not closing or time.monotonic() >= self.kill_at):
            for child in self.children.values():
                kill_group(child.pid)

    def _on_stop(self, *_: object) -> None:
        # A signal can come while a message is being sent, so its handler sends none.
        if any(child.has_sinks for child in self.children.values()):
            self.stop_asked = True
        else:
            self.end_all("the cluster was stopped")

    def _patience(self) -> float:
        now, waits = time.monotonic(), [when for when, _ in self.due.values()]
        if self.kill_at > now:
            waits.append(self.kill_at)
        return max(0.0, min([TICK_SECONDS, *(when - now for when in waits)]))


def main() -> None:
    folder = Path(sys.argv[1])
    parent = Parent(folder)
    if parent.spec.line is None:
        serve(parent)
        return
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended while it started"))
        serve(parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # made for this host only: see nbkit.notebook.cluster.hosts.agent


def serve(parent: Parent) -> None:
    """Import torch, wait for the controller, and be the parent of the ranks until they have ended."""
    folder, began = parent.folder, time.monotonic()
    # Import everything that ranks need once, before they are forked. Do not touch CUDA here: a forked child could not
    # use CUDA then.
    import torch.distributed
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    import nbkit.bridge.engine  # noqa: F401
    from nbkit.rank import torch_private

    if lacking := torch_private.problems_so_far():
        (folder / LACKING).write_text(json.dumps(lacking))
    look_in(os.getcwd())
    while not Path(parent.spec.engine_file).exists():
        time.sleep(0.01)
        if not parent.spec.launcher.is_alive() or time.monotonic() - began > START_SECONDS:
            log("the start was given up")
            if controller := controller_of(folder):
                controller.end(signal.SIGTERM)
            return
    gc.collect()
    gc.freeze()  # forks share memory pages only while no garbage collection writes to them
    parent.run()


if __name__ == "__main__":
    main()
