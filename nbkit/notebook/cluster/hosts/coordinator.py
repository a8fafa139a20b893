"""The coordinator of a cluster on several hosts: a process beside the controller, on the notebook's host.

    python -m nbkit.notebook.cluster.hosts.coordinator FOLDER

The launcher starts an agent on each host, and each agent keeps a signed connection to the coordinator, which

- lets the hosts fork their ranks when all hosts fit together (`Gathering`);
- forwards the reports of failed cells and dead ranks between the hosts, so that all hosts release their ranks without
  the notebook, and the first host's parent can replace any rank;
- lets trainings save before a batch system takes the hosts away, at a time limit or for another job;
- ends the cluster when it is stopped, when the controller has ended, or when nobody has used it for its time to live.

`Places` records which hosts have joined and which ranks each holds. `Reachability` asks the agents whether their hosts
can connect to each other. `Gathering` waits for all agents and compares their hosts. All of this comes before the first
fork.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbkit.device_kinds import GLOO
from nbkit.errors import ClusterError, NbkitError
from nbkit.mpi_variables import forget_mpi
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.agent import check_versions, notes_on
from nbkit.notebook.cluster.hosts.launcher import LauncherDriver, LauncherStatus, loaded
from nbkit.notebook.cluster.hosts.network import listen_at
from nbkit.notebook.cluster.hosts.progress import StartProgress
from nbkit.wire import cluster_end
from nbkit.wire.cluster_end import ClusterEnd
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import (
    CellFailed,
    Death,
    DismissRank,
    EndNow,
    EndOfCluster,
    EndRank,
    EndTraining,
    ForAgent,
    ForCoordinator,
    ForHost,
    HostJoined,
    HostsTried,
    HostUnfit,
    InterruptRank,
    InUse,
    Listen,
    Listening,
    PassedOn,
    RankEnded,
    RankIsDead,
    RankPlaced,
    RankSaid,
    RankStarted,
    ReplacementNoted,
    StartFailed,
    StartRank,
    StartRanks,
    TellRank,
    ToldToEnd,
    TrainingEnded,
    TryHosts,
    deliver,
    handles,
)
from nbkit.wire.processes import Process, followers


class ConnectedHost:
    """A host whose agent has connected."""

    def __init__(self, link: SignedLink[ForAgent | ForHost, ForCoordinator]) -> None:
        self.link = link
        self._facts: HostJoined | None = None

    @property
    def has_joined(self) -> bool:
        return self._facts is not None

    @property
    def facts(self) -> HostJoined:
        """Return the agent's report, with later changes of devices. Call it only after the agent has joined."""
        assert self._facts is not None
        return self._facts

    @facts.setter
    def facts(self, facts: HostJoined) -> None:
        self._facts = facts

    @property
    def name(self) -> str:
        return self.facts.host


class Places:
    """The hosts of a cluster and the ranks that they hold.

    counts: number of ranks on each host. hosts: index -> host, for hosts that have joined.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.hosts: dict[int, ConnectedHost] = {}
        self._settled: list[ConnectedHost] = []  # all hosts, once all have joined

    @property
    def total(self) -> int:
        return len(self.counts)

    def ranks_of(self, index: int) -> range:
        """Return the ranks of a host."""
        base = sum(self.counts[:index])
        return range(base, base + self.counts[index])

    def settle(self) -> list[HostJoined]:
        """Return the hosts' reports in order. Call it when all have joined."""
        self._settled = [self.hosts[index] for index in range(self.total)]
        return [host.facts for host in self._settled]

    def placed(self, host: ConnectedHost, placed: RankPlaced) -> None:
        """Record the new device of a rank that moved to a spare device of its host."""
        facts = host.facts
        at = placed.rank - self.ranks_of(facts.index).start
        labels, reasons = [*facts.labels], [*facts.reasons]
        labels[at], reasons[at] = placed.label, placed.reason
        host.facts = replace(facts, labels=tuple(labels), reasons=tuple(reasons), spares=placed.spares)

    def shown(self, state: StartProgress) -> StartProgress:
        """Return `state` with the ranks' devices and the spare devices."""
        return progress.with_devices(state, [host.facts for host in self._settled])


_SHOWN = 4


class Reachability:
    """Checks that hosts can connect to each other: first all of them listen, then each tries to connect to others.

    hosts: all hosts, in order.
    """

    def __init__(self, hosts: Sequence[ConnectedHost]) -> None:
        self._hosts = hosts
        self._places: dict[int, tuple[str, int]] = {}
        self._failed: dict[int, tuple[tuple[int, str], ...]] = {}
        for host in hosts:
            host.link.send(Listen())

    @property
    def answered(self) -> list[ConnectedHost]:
        """Return the hosts that have reported."""
        return [self._hosts[number] for number in sorted(self._failed)]

    def listens(self, host: ConnectedHost, at: Listening) -> None:
        """Record that a host listens. Once all do, tell each one which hosts to try."""
        self._places[host.facts.index] = at.address, at.port
        if len(self._places) == len(self._hosts):
            for number, each in enumerate(self._hosts):
                tried = hosts_to_try(number, len(self._hosts))
                each.link.send(TryHosts(tuple((other, *self._places[other]) for other in tried)))

    def reached(self, host: ConnectedHost, tried: HostsTried) -> bool:
        """Record a host's report. Return True if all hosts have reported.

        Raises ClusterError if all have reported and one cannot connect to another.
        """
        self._failed[host.facts.index] = tried.unanswered
        if len(self._failed) < len(self._hosts):
            return False
        ways = [(source, *to) for source in sorted(self._failed) for to in self._failed[source]]
        if ways:
            source, other, _ = ways[0]
            more = f"; and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
            first, second = self._hosts[source].name, self._hosts[other].name
            raise ClusterError(
                f"The host {first} cannot connect to {second}.",
                numbers="; ".join(self._way(*way) for way in ways[:_SHOWN]) + more,
                hint=f"ping {self._places[other][0]}   (in a terminal on {first}): a firewall between the hosts has to "
                "let connections to all ports pass; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another network",
            )
        return True

    def _way(self, source: int, other: int, why: str) -> str:
        start, (address, port) = self._places[source][0], self._places[other]
        return f"from {self._hosts[source].name} ({start}) to {self._hosts[other].name} ({address}, port {port}): {why}"


def hosts_to_try(own: int, n: int) -> list[int]:
    """Return the hosts that host `own` of `n` tries: all of them up to five hosts, else about 2 log2 n.

    Other hosts also try host `own`.
    """
    steps = [1 << power for power in range(max(1, n.bit_length()))]
    return sorted({(own + sign * step) % n for step in steps for sign in (1, -1)} - {own})


ANSWER_SECONDS = 90.0  # from the first answer, or the job's start, until all have answered


@dataclass(frozen=True)
class Fit:
    """The settings with which compatible hosts start their ranks.

    addresses: of all hosts. notes: messages for the user.
    """

    backend: str
    device: str
    addresses: tuple[str, ...]
    notes: tuple[str, ...]


class Gathering:
    """Waits for all agents and compares their hosts.

    places: gets the hosts that join. port: the port at which this process listens for agents.
    """

    def __init__(self, driver: LauncherDriver, places: Places, port: int) -> None:
        self._driver, self._places, self._port = driver, places, port
        self._first_sign = 0.0
        self._refused: list[str] = []  # why agents were refused
        self._fit: Fit | None = None  # when the hosts have been compared
        self._reachability: Reachability | None = None

    def join(self, host: ConnectedHost, facts: HostJoined) -> str:
        """Record an agent. Return why it is refused, or "".

        If two agents have the same number, the second is refused. Raises ClusterError if all have joined but do not fit
        together.
        """
        index, total = facts.index, self._places.total
        self._first_sign = self._first_sign or time.monotonic()
        if (first := self._places.hosts.get(index)) is not None:
            why = f"an agent on {facts.host} came as host {index} of {total}, which {first.name} is already"
            print(f"{time.strftime('%H:%M:%S')} coordinator: {why}: refused", flush=True)
            host.link.send(EndNow(why))
            self._refused.append(why)
            return why
        host.facts = facts
        self._places.hosts[index] = host
        if len(self._places.hosts) == total:
            self._fit = self._compared()
            self._first_sign = time.monotonic()  # now wait until they have tried each other
            self._reachability = Reachability([self._places.hosts[number] for number in range(total)])
        return ""

    def listens(self, host: ConnectedHost, at: Listening) -> None:
        """Record where an agent listens."""
        assert self._reachability is not None
        self._reachability.listens(host, at)

    def reached(self, host: ConnectedHost, tried: HostsTried) -> Fit | None:
        """Record an agent's report. When all hosts fit together, return the settings to start with.

        Raises ClusterError if a host cannot connect to another one.
        """
        assert self._reachability is not None and self._fit is not None
        if not self._reachability.reached(host, tried):
            return None
        refused = (f"{why}: it was refused" for why in self._refused)
        return replace(self._fit, notes=(*self._fit.notes, *refused))

    def progress(self, seen: LauncherStatus) -> StartProgress:
        """Return the progress of the start.

        seen: the launcher's status. Raises ClusterError if the start has failed or takes too long.
        """
        if seen.error:
            raise seen.error
        if seen.state == "over":
            raise ClusterError(
                f"{seen.words[:1].upper()}{seen.words[1:]} before the cluster was ready.",
                numbers=self._driver.log() or "its output is not here, or empty",
                hint="%cluster start   again",
            )
        if seen.state == "pending":  # a host may still wait in a queue while others have answered
            self._first_sign = 0.0
        elif seen.state == "running":
            self._first_sign = self._first_sign or time.monotonic()
        if self._first_sign and time.monotonic() - self._first_sign > ANSWER_SECONDS:
            raise self._unanswered()
        if seen.state == "pending" and not self._places.hosts:
            return StartProgress("waiting", seen.words)
        answered = f"{len(self._places.hosts)} of {self._places.total} hosts have answered"
        return StartProgress("starting", f"{seen.words}; {answered}")

    def lost(self, host: ConnectedHost) -> ClusterError:
        """Return the error for a host that left during the start."""
        index, gone = host.facts.index, "does not answer any more" if host.link.broke else "has lost its agent"
        return ClusterError(
            f"The host {host.name} {gone}: the cluster was starting.",
            numbers=self._driver.log() or f"it had joined as host {index}, with {self._driver.counts[index]} ranks",
            hint="%cluster start   again",
        )

    def _compared(self) -> Fit:
        facts = self._places.settle()
        check_versions({one.host: one.versions for one in facts})
        differ = notes_on({one.host: one.driver for one in facts}, {one.host: one.ahead for one in facts})
        devices = {one.host: one.device for one in facts}
        if len(set(devices.values())) > 1:
            raise ClusterError(
                "Some hosts have GPUs for the ranks, and other hosts have none.",
                numbers=", ".join(f"{host}: {device}" for host, device in devices.items()),
                hint="--cpu   or   hosts that are alike",
            )
        notes = (*(f"{one.host}: {note}" for one in facts for note in one.notes), *differ)
        return Fit(
            backend=facts[0].backend if len({one.backend for one in facts}) == 1 else GLOO,
            device=facts[0].device,
            addresses=tuple(sorted({address for one in facts for address in one.addresses})),
            notes=notes,
        )

    def _unanswered(self) -> ClusterError:
        all_there = self._reachability is not None
        hosts = self._reachability.answered if self._reachability else list(self._places.hosts.values())
        here, total = [host.name for host in hosts], self._places.total
        what = f"{total - len(here)} of {total} hosts did not answer within {ANSWER_SECONDS:.0f} s."
        if self._refused and not all_there:  # the launcher gave two agents the same number
            hint = "the launcher has to set NBKIT_HOST_INDEX, from 0, for each host: docs/reference/own-launchers.md"
            return ClusterError(what, numbers="; ".join(self._refused), hint=hint)
        return ClusterError(
            what,
            numbers=f"answered: {', '.join(here) or 'none'}; they have to reach {self._driver.address}, port "
            f"{self._port} and above\n{self._driver.log()}".strip(),
            hint="a firewall between the hosts must allow their connections",
        )


TICK_SECONDS = 0.1
LOOK_SECONDS = 0.5  # interval between questions to the launcher during the start
SELDOM_SECONDS = 20.0  # and afterwards: connections report ends sooner
RANKS_SECONDS = 180.0  # for the ranks to start
END_SECONDS = 4.0  # for the agents to end their ranks, before the launcher ends the agents


class Coordinator:
    """The coordinator; see the module's docstring."""

    def __init__(self, folder: Path, plan: dict[str, Any], driver: LauncherDriver) -> None:
        self.folder, self.plan, self.driver = folder, plan, driver
        self.secret = secrets.token_hex(32)
        self.listener = listen_at(driver.address)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.places = Places(driver.counts)
        self.hosts = self.places.hosts  # index -> host, for hosts that have joined
        self.gathering = Gathering(driver, self.places, self.listener.getsockname()[1])
        self.dead: set[int] = set()
        self.state = StartProgress("waiting", "the controller starts")
        self.going = False
        self.ending = ""  # why
        self.seen = time.monotonic()
        self.looked, self.look = 0.0, LauncherStatus("pending", "")
        self.told = ""  # why trainings were told to end
        self.taken_away = False  # the hosts are taken away, so their ranks end by themselves
        self.controller: Process | None = None
        # If the notebook waits for the start and ends, the start is given up.
        self._notebook = None if plan["detached"] else Process(**plan["notebook"])

    def run(self) -> None:
        """Run until the cluster has ended."""
        signal.signal(signal.SIGTERM, lambda *_: self.end("the cluster was stopped"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.driver.start(self._payload())
            while not self.ending:
                for key, _ in self.selector.select(TICK_SECONDS):
                    self._accept() if key.data is None else self._hear(key.data)
                self._watch()
        except NbkitError as error:
            self._fail(error)
        finally:
            self._finish()

    def _payload(self) -> str:
        """Return the input of an agent. Raises ClusterError if the start was given up."""
        path = Path(self.plan["engine_file"])
        while not path.exists() or not path.stat().st_size or self._find_controller() is None:
            time.sleep(0.01)
            if self.ending or self._is_given_up():
                raise ClusterError("The start was cancelled.")
        request = self.plan["request"]
        return json.dumps(
            {
                "name": self.plan["name"],
                "address": self.driver.address,
                "port": self.listener.getsockname()[1],
                "secret": self.secret,
                "counts": list(self.driver.counts),
                "cpu": request["cpu"],
                "spares": request["spares"],
                "cwd": self.plan["cwd"],
                "environment": self.plan["environment"],
                "engine": json.loads(path.read_text()),
            }
        )

    def _is_given_up(self) -> bool:
        return self._notebook is not None and not self._notebook.is_alive()

    def _find_controller(self) -> Process | None:
        if self.controller is None:
            with suppress(OSError, ValueError):
                self.controller = Process(**json.loads((self.folder / "controller.json").read_text()))
        return self.controller

    # Lines --------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        nonce = secrets.token_hex(16)
        try:
            sock.sendall(f"{nonce} {time.time()}\n".encode())
        except OSError:
            return
        self.selector.register(
            sock, selectors.EVENT_READ, ConnectedHost(SignedLink(sock, key_of(self.secret, nonce), opened=False))
        )

    def _hear(self, host: ConnectedHost) -> None:
        messages = host.link.receive()
        if messages is None:
            self.selector.unregister(host.link.sock)
            if host.link.refused and not self.going:
                raise ClusterError(
                    "A host has another release of nbkit than this notebook.",
                    numbers=f"{host.link.sock.getpeername()[0]}: {host.link.refused.numbers}",
                    hint="use one environment everywhere: --python PATH names the one on the hosts",
                )
            host.link.sock.close()
            if host.has_joined:
                self._lost(host)
            return
        for message in messages:
            deliver(message, self, host)

    @handles(HostJoined)
    def _on_joined(self, facts: HostJoined, host: ConnectedHost) -> None:
        why = self.gathering.join(host, facts)
        if why and self.going:
            self._show(replace(self.state, notes=(*self.state.notes, f"{why}: it was refused")))

    @handles(Listening)
    def _on_listening(self, at: Listening, host: ConnectedHost) -> None:
        self.gathering.listens(host, at)

    @handles(HostsTried)
    def _on_tried(self, tried: HostsTried, host: ConnectedHost) -> None:
        if (fit := self.gathering.reached(host, tried)) is not None:
            self._begin(fit)

    @handles(HostUnfit)
    def _on_unfit(self, unfit: HostUnfit, _: ConnectedHost) -> None:
        raise ClusterError(f"{unfit.host}: {unfit.what}", numbers=unfit.numbers, hint=unfit.hint)

    @handles(StartFailed)
    def _on_start_failed(self, failed: StartFailed, host: ConnectedHost) -> None:
        log = "\n    ".join(failed.log or ["(its log is empty)"])
        raise ClusterError(
            f"Rank {failed.rank} on {host.name} ended while the cluster was starting.",
            numbers=f"{failed.how}; the last lines of its log:\n    {log}",
            hint=f"nbkit doctor   (in a terminal on {host.name}) says what is missing",
        )

    @handles(InUse)
    def _on_use(self, _: InUse, __: ConnectedHost) -> None:
        self.seen = time.monotonic()

    @handles(RankIsDead)
    def _on_rank_is_dead(self, message: RankIsDead, host: ConnectedHost) -> None:
        self._died(message.death, host)

    @handles(ReplacementNoted)
    def _on_replacement(self, noted: ReplacementNoted, _: ConnectedHost) -> None:
        self._write_end(noted.end)

    @handles(RankPlaced)
    def _on_placed(self, placed: RankPlaced, host: ConnectedHost) -> None:
        self.places.placed(host, placed)
        self._show(self.places.shown(self.state))
        self._to_first(placed)

    @handles(RankStarted, RankSaid)
    def _to_first(self, message: PassedOn, _: ConnectedHost | None = None) -> None:
        """Send a message to the first host's parent, which decides about replacements."""
        if first := self.hosts.get(0):
            first.link.send(message)

    @handles(RankEnded)
    def _on_ended(self, ended: RankEnded, _: ConnectedHost) -> None:
        if 0 in self.hosts:
            self._to_first(ended)
        else:  # without the first host, no rank is replaced
            self._died(ended.death, None, unregister=True)

    @handles(CellFailed, InterruptRank, EndRank, StartRank, TellRank, DismissRank)
    def _on_message_for_others(self, message: PassedOn, source: ConnectedHost) -> None:
        self._pass_on(message, source)

    def _pass_on(self, message: ForHost, source: ConnectedHost | None = None) -> None:
        """Send a message to all hosts but its source. A host ignores messages about ranks of others."""
        for host in self.hosts.values():
            if host is not source:
                host.link.send(message)

    def _begin(self, fit: Fit) -> None:
        """Let the hosts fork their ranks. Call it when all have joined and fit together."""
        # The time in the queue and the ranks' start do not count as idle time. Afterwards parents send InUse.
        self.going, self.seen = True, time.monotonic() + RANKS_SECONDS
        self.looked = 0.0  # ask the launcher again: now it knows when the job ends, and how often it was requeued
        for host in self.hosts.values():
            host.link.send(StartRanks(fit.backend, fit.device, fit.addresses))
        self._show(self.places.shown(StartProgress("forked", notes=fit.notes, backend=fit.backend)))

    def _died(self, death: Death, source: ConnectedHost | None, *, unregister: bool = False) -> None:
        """Handle the death of a rank: write it to a file for the notebook, and tell the other hosts."""
        self.dead.add(death.rank)
        self._write_end(death)
        if self.taken_away:  # the other ranks end by themselves, and may still be saving
            return
        for index, host in enumerate(host for host in self.hosts.values() if host is not source):
            host.link.send(RankIsDead(death, unregister=unregister and index == 0))

    def _write_end(self, death: Death) -> None:
        """Write the report of a death for the notebook. For a replaced rank it is a RankEnd."""
        with suppress(OSError):  # the folder goes with the cluster
            cluster_end.write_rank(self.folder, death)

    def _lost(self, host: ConnectedHost) -> None:
        """Handle a closed connection to an agent: its ranks have ended or cannot be reached."""
        index = host.facts.index
        self.hosts.pop(index, None)
        if not self.going:
            raise self.gathering.lost(host)
        left = [rank for rank in self.places.ranks_of(index) if rank not in self.dead]
        self.looked = 0.0
        seen = self._look()
        how = f"its host {host.name} does not answer" if host.link.broke else f"the agent of its host {host.name} ended"
        if self.taken_away:
            how = self.told
        if seen.state == "over" or (self.taken_away and seen.state == "ending"):
            how = seen.words
        # The coordinator does not know the host's cells. Each other rank leaves the cells that it shares with dead
        # ones.
        for rank in left:
            self._died(Death(rank, how, time.time()), host, unregister=True)
        if not self.hosts:
            if (end := cluster_end.read(self.folder)) is not None:
                cluster_end.write(self.folder, replace(end, why=how, again=seen.again))
            self.end(how)

    # Hosts that are taken away --------------------------------------------------------------------------------------

    def _save_in_time(self) -> None:
        """Let trainings save and end before the hosts are taken away. Cancel this if the end is later again."""
        if self.taken_away:
            return
        if time.time() >= self.look.save_at and self.look.why != self.told:
            self.looked = 0.0  # the time limit may have changed
            if time.time() >= self._look().save_at:
                self._tell(EndTraining(self.look.why))
        elif self.told and time.time() < self.look.save_at:
            print(f"{time.strftime('%H:%M:%S')} coordinator: there is time again", flush=True)
            self.told = ""
            cluster_end.take_back(self.folder)
            self._pass_on(EndTraining(""))

    @handles(ToldToEnd)
    def _on_told_to_end(self, _: ToldToEnd, __: ConnectedHost) -> None:
        """Let all hosts end in order, with the launcher's reason."""
        if self.taken_away:
            return
        self.taken_away, self.looked = True, 0.0
        seen = self._look()
        why = seen.words if seen.state in ("ending", "over") else seen.why if time.time() >= seen.save_at else ""
        self._tell(EndOfCluster(why or "the hosts of the cluster were told to end (SIGTERM)"))

    def _tell(self, message: EndTraining | EndOfCluster) -> None:
        print(f"{time.strftime('%H:%M:%S')} coordinator: {message.why}: trainings are saved and end", flush=True)
        self.told = message.why
        end = cluster_end.read(self.folder) or ClusterEnd(message.why)
        cluster_end.write(self.folder, replace(end, why=message.why, again=self.look.again))
        self._pass_on(message)

    @handles(TrainingEnded)
    def _on_training_ended(self, ended: TrainingEnded, _: ConnectedHost) -> None:
        """Write the end of a training here too, because the folder on the rank's host is removed with the ranks."""
        cluster_end.write(self.folder, ClusterEnd(self.told or ended.why, ended.step, ended.saved, self.look.again))

    # Life ---------------------------------------------------------------------------------------------------------

    def _look(self) -> LauncherStatus:
        often = SELDOM_SECONDS if self.going else LOOK_SECONDS
        if time.monotonic() - self.looked > often:
            self.looked, self.look = time.monotonic(), self.driver.status()
        return self.look

    def _watch(self) -> None:
        controller = self._find_controller()
        if controller and not controller.is_alive() and not self.taken_away:
            if self.going and self.hosts:  # trainings save; the cluster ends with the last host
                self.taken_away = True
                self._tell(EndOfCluster("the controller of the cluster has ended"))
            else:
                self.end("the controller is gone")
        elif not self.going and self._is_given_up():
            self.end("the notebook has ended while the cluster was starting")
        elif self.going and time.monotonic() - self.seen > self.plan["ttl"]:
            self.end(f"no notebook and no cell for {self.plan['ttl']:.0f} s")
        seen = self._look()
        if not self.going and not self.ending:
            self._show(self.gathering.progress(seen))
        elif self.going:
            self._save_in_time()

    def _show(self, state: StartProgress) -> None:
        if state != self.state:
            self.state = state
            with suppress(OSError):  # the folder goes with the cluster
                progress.write(self.folder, state)

    def _fail(self, error: NbkitError) -> None:
        self.ending = self.ending or error.what
        self._show(StartProgress("over", error.what, what=error.what, numbers=error.numbers, hint=error.hint))

    def end(self, why: str) -> None:
        """End the cluster soon."""
        self.ending = self.ending or why

    def _finish(self) -> None:
        print(f"{time.strftime('%H:%M:%S')} coordinator: ending the cluster: {self.ending}", flush=True)
        self._pass_on(EndNow(self.ending))
        if self.state.phase != "over":
            self._show(StartProgress("over", self.ending))
        deadline = time.monotonic() + END_SECONDS
        while self.hosts and time.monotonic() < deadline:
            for key, _ in self.selector.select(TICK_SECONDS):
                if key.data is not None and key.data.link.receive() is None:
                    self.selector.unregister(key.data.link.sock)
                    self.hosts.pop(key.data.facts.index if key.data.has_joined else -1, None)
        self.driver.stop()
        # A notebook that waits for the start ends the controller itself after it has shown the reason.
        if self.controller and (self.going or self._notebook is None or self._is_given_up()):
            self.controller.end(signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while self.controller.is_alive() and time.monotonic() < deadline:
                time.sleep(0.02)
            self.controller.end(signal.SIGKILL)
            for scheduler in followers(self.controller.pid, self.folder):
                scheduler.end(signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "hosts.json").read_text())
    os.umask(0o077)
    forget_mpi(os.environ)  # processes that launchers start inherit this environment
    try:
        driver = LauncherDriver(loaded(plan["request"]), folder)
        coordinator = Coordinator(folder, plan, driver)
    except NbkitError as error:
        progress.write(
            folder, StartProgress("over", error.what, what=error.what, numbers=error.numbers, hint=error.hint)
        )
        return
    coordinator.run()


if __name__ == "__main__":
    main()
