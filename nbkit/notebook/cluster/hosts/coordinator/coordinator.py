"""The coordinator of a cluster on several hosts: a process beside the controller, on the notebook's host.

    python -m nbkit.notebook.cluster.hosts.coordinator.coordinator FOLDER

It has the launcher start an agent on each host, and each agent keeps a signed line to it. It lets the ranks be forked
when all hosts fit together (gathering.py); it passes on what the parents of the ranks tell of cells that failed and
ranks that died, so that all hosts release their ranks without the notebook, and the first host's parent can have any
rank replaced; it has trainings saved before a launcher takes the hosts away, at a time limit or for another job; and it
ends the cluster when it is stopped, when the controller is gone, or when nobody has used it for its time to live.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbkit.errors import ClusterError, NbkitError
from nbkit.notebook.cluster.hosts import progress
from nbkit.notebook.cluster.hosts.coordinator.gathering import Fit, Gathering
from nbkit.notebook.cluster.hosts.coordinator.places import Host, Places
from nbkit.notebook.cluster.hosts.launchers.choose_launcher import starter_of
from nbkit.notebook.cluster.hosts.network import listen_at
from nbkit.notebook.cluster.hosts.progress import Progress, Seen
from nbkit.notebook.cluster.hosts.start_request import Starter, loaded
from nbkit.wire import cluster_end
from nbkit.wire.cells import ranks_named
from nbkit.wire.cluster_end import ClusterEnd
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.processes import Process, followers

TICK_SECONDS = 0.1
LOOK_SECONDS = 0.5  # at the queue, while the job waits in it
SELDOM_SECONDS = 20.0  # afterwards: lines say more, and sooner
RANKS_SECONDS = 180.0  # for the ranks to start
END_SECONDS = 4.0  # for the agents to end their ranks, before the launcher ends the agents


class Coordinator:
    """See the module's text."""

    def __init__(self, folder: Path, plan: dict[str, Any], starter: Starter) -> None:
        self.folder, self.plan, self.starter = folder, plan, starter
        self.secret = secrets.token_hex(32)
        self.listener = listen_at(starter.address)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.places = Places(starter.counts, starter.spare_hosts)
        self.hosts = self.places.hosts  # index -> host, of those that have joined
        self.gathering = Gathering(starter, self.places, self.listener.getsockname()[1])
        self.dead: set[int] = set()
        self.state = Progress("waiting", "the controller starts")
        self.going = False
        self.ending = ""  # why
        self.seen = time.monotonic()
        self.looked, self.look = 0.0, Seen("pending", "")
        self.told = ""  # why trainings are to end
        self.taken_away = False  # the hosts: their ranks end too
        self.controller: Process | None = None
        # The notebook, whose end gives up a start, unless it does not wait for it.
        self._launcher = None if plan["detached"] else Process(**plan["launcher"])

    def run(self) -> None:
        """Until the cluster has ended."""
        signal.signal(signal.SIGTERM, lambda *_: self.end("the cluster was stopped"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.starter.start(self._payload())
            while not self.ending:
                for key, _ in self.selector.select(TICK_SECONDS):
                    self._accept() if key.data is None else self._hear(key.data)
                self._watch()
        except NbkitError as error:
            self._fail(error)
        finally:
            self._finish()

    def _payload(self) -> str:
        """What an agent has to know. Raises ClusterError when the start was given up."""
        path = Path(self.plan["engine_file"])
        while not path.exists() or not path.stat().st_size or self._find_controller() is None:
            time.sleep(0.01)
            if self.ending or self._is_given_up():
                raise ClusterError("The start was given up.")
        return json.dumps(
            {
                "name": self.plan["name"],
                "address": self.starter.address,
                "port": self.listener.getsockname()[1],
                "secret": self.secret,
                "counts": list(self.starter.counts),
                "cpu": self.starter.cpu,
                "spares": self.plan["request"]["spares"],
                "spare_hosts": self.starter.spare_hosts,
                "cwd": self.plan["cwd"],
                "environment": self.plan["environment"],
                "engine": json.loads(path.read_text()),
            }
        )

    def _is_given_up(self) -> bool:
        return self._launcher is not None and not self._launcher.is_alive()

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
            sock, selectors.EVENT_READ, Host(SignedLink(sock, key_of(self.secret, nonce), opened=False))
        )

    def _hear(self, host: Host) -> None:
        messages = host.link.receive()
        if messages is None:
            self.selector.unregister(host.link.sock)
            host.link.sock.close()
            if host.facts:
                self._lost(host)
            return
        for message in messages:
            self._heard(host, message)

    def _heard(self, host: Host, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "joined":
            why = self.gathering.join(host, message)
            if why and self.going:
                self._show(replace(self.state, notes=(*self.state.notes, f"{why}: it was refused")))
        elif event in ("listens", "reached"):
            if (fit := self.gathering.hear(host, message)) is not None:
                self._begin(fit)
        elif event == "refused":
            raise ClusterError(
                f"{message['host']}: {message['what']}", numbers=message["numbers"], hint=message["hint"]
            )
        elif event == "start_failed":
            log = "\n    ".join(message["log"] or ["(its log is empty)"])
            raise ClusterError(
                f"Rank {message['rank']} on {host.name} ended while the cluster was starting.",
                numbers=f"{message['how']}; the last lines of its log:\n    {log}",
                hint=f"nbkit doctor   (in a terminal on {host.name}) says what is missing",
            )
        elif event == "seen":
            self.seen = time.monotonic()
        elif event == "died":
            self._died(message, host)
        elif event == "note":
            self._write_end(message)
        elif event in ("started", "of_rank", "placed", "lost"):
            if event == "placed":
                self.places.placed(host, message["rank"], message["label"], message["reason"], message["spares"])
            if event == "placed" or host.has_taken_place:
                self._show(self.places.shown(self.state))
            self._to_first(message)
        elif event == "told_to_end":
            self._end_in_order()
        elif event == "training_ended":
            self._training_ended(message)
        else:  # failed; interrupt and end go to whoever has that rank
            self._pass_on(message, host)

    def _begin(self, fit: Fit) -> None:
        """All hosts are there, and fit together: let them fork their ranks."""
        # The time in the queue is nobody's absence, nor is that in which ranks start: then their parents say "seen".
        self.going, self.seen = True, time.monotonic() + RANKS_SECONDS
        self.looked = 0.0  # as it runs: when its time is over, and how often it was put back in the queue before
        for host in self.hosts.values():
            host.link.send(event="go", backend=fit.backend, device=fit.device, addresses=fit.addresses)
        self._show(self.places.shown(Progress("forked", notes=fit.notes, backend=fit.backend)))

    def _pass_on(self, message: dict[str, Any], source: Host | None) -> None:
        for host in self.hosts.values():
            if host is not source:
                host.link.send(**message)

    def _died(self, death: dict[str, Any], source: Host | None, *, unregister: bool = False) -> None:
        """A rank has died: the notebook reads of it here, the other hosts are told."""
        self.dead.add(death["rank"])
        record = self._write_end(death)
        if self.taken_away:  # the others end by themselves, and may still be saving
            return
        for index, host in enumerate(host for host in self.hosts.values() if host is not source):
            host.link.send(event="died", unregister=unregister and index == 0, **record)

    def _write_end(self, death: dict[str, Any]) -> dict[str, Any]:
        """What the notebook reads of a rank that has ended, and of who has taken its place."""
        record = {key: value for key, value in death.items() if key != "event"}
        path = self.folder / f"rank{death['rank']}.end.json"
        scratch = path.with_suffix(".tmp")
        with suppress(OSError):  # the folder goes with the cluster
            scratch.write_text(json.dumps(record))
            scratch.replace(path)
        return record

    def _to_first(self, message: dict[str, Any]) -> None:
        """The first host's parent decides who is replaced. Without it nobody is."""
        if first := self.hosts.get(0):
            first.link.send(**message)
        elif message["event"] == "lost":
            self._died(message, None, unregister=True)

    def _lost(self, host: Host) -> None:
        """An agent's line is closed: its ranks are gone, or out of reach."""
        index = host.facts["index"]
        self.hosts.pop(index, None)
        if not self.going:
            raise self.gathering.lost(host)
        if index >= len(self.places.counts):  # it was in reserve
            self._show(self.places.shown(self.state))
            return
        left = [rank for rank in self.places.ranks_of(index) if rank not in self.dead]
        self.looked = 0.0
        seen = self._look()
        how = f"its host {host.name} does not answer" if host.link.broke else f"the agent of its host {host.name} ended"
        if self.taken_away:
            how = self.told
        if seen.state == "over" or (self.taken_away and seen.state == "ending"):
            how = seen.words
        # Which cells it was in is not known here; each of the others is released from those that it shares.
        about = {"pid": 0, "how": how, "when": time.time(), "cells": None, "failed": ""}
        stays = not self.taken_away and not self.dead and seen.state not in ("ending", "over")
        if stays and (spare := self.places.take_place(index)) is not None:
            self._put_in_place(spare, host, about)
            return
        for rank in left:
            self._died({"rank": rank, **about}, host, unregister=True)
        if not self.places.hold_ranks:
            if (end := cluster_end.read(self.folder)) is not None:
                cluster_end.write(self.folder, replace(end, why=how, again=seen.again))
            self.end(how)

    def _put_in_place(self, spare: Host, gone: Host, about: dict[str, Any]) -> None:
        """A host that was in reserve holds the ranks of one that is gone: the first host's parent has them started.

        about: what is told of their deaths. Where they are in no training that goes on it declares them dead.
        """
        ranks = self.places.ranks_of(spare.facts["index"])
        left = len(self.places.in_reserve)
        said = (
            f"{ranks_named([*ranks]).lower()} {'is' if len(ranks) == 1 else 'are'} on the spare host {spare.name} now, "
            f"in the place of {gone.name}; {left or 'no'} spare host{'s are' if left > 1 else ' is'} left"
        )
        print(f"{time.strftime('%H:%M:%S')} coordinator: {about['how']}: {said}", flush=True)
        for rank in ranks:
            self._to_first({"event": "lost", "rank": rank, **about})
        self._to_first({"event": "placed", "rank": ranks[0], "said": said})

    # Hosts that are taken away --------------------------------------------------------------------------------------

    def _save_in_time(self) -> None:
        """Have trainings saved before the hosts are taken away; take it back where there is time again."""
        if self.taken_away:
            return
        if time.time() >= self.look.save_at and self.look.why != self.told:
            self.looked = 0.0  # a limit may have been changed since
            if time.time() >= self._look().save_at:
                self._tell(self.look.why, "end_training")
        elif self.told and time.time() < self.look.save_at:
            print(f"{time.strftime('%H:%M:%S')} coordinator: there is time again", flush=True)
            self.told = ""
            cluster_end.take_back(self.folder)
            self._pass_on({"event": "end_training", "why": ""}, None)

    def _end_in_order(self) -> None:
        """A host was told to end, by SIGTERM; the launcher knows why."""
        if self.taken_away:
            return
        self.taken_away, self.looked = True, 0.0
        seen = self._look()
        why = seen.words if seen.state in ("ending", "over") else seen.why if time.time() >= seen.save_at else ""
        self._tell(why or "the hosts of the cluster were told to end (SIGTERM)", "end_in_order")

    def _tell(self, why: str, event: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} coordinator: {why}: trainings are saved and end", flush=True)
        self.told = why
        end = cluster_end.read(self.folder) or ClusterEnd(why)
        cluster_end.write(self.folder, replace(end, why=why, again=self.look.again))
        self._pass_on({"event": event, "why": why}, None)

    def _training_ended(self, message: dict[str, Any]) -> None:
        """Written here too: the folder of the ranks is another one, and goes with them."""
        why, again = self.told or message["why"], self.look.again
        cluster_end.write(self.folder, ClusterEnd(why, message["step"], message["saved"], again))

    # Life ---------------------------------------------------------------------------------------------------------

    def _look(self) -> Seen:
        often = SELDOM_SECONDS if self.going else LOOK_SECONDS
        if time.monotonic() - self.looked > often:
            self.looked, self.look = time.monotonic(), self.starter.look()
        return self.look

    def _watch(self) -> None:
        controller = self._find_controller()
        if controller and not controller.is_alive() and not self.taken_away:
            if self.going and self.hosts:  # trainings are saved, and the end of the last host's ranks is the cluster's
                self.taken_away = True
                self._tell("the controller of the cluster has ended", "end_in_order")
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

    def _show(self, state: Progress) -> None:
        if state != self.state:
            self.state = state
            with suppress(OSError):  # the folder goes with the cluster
                progress.write(self.folder, state)

    def _fail(self, error: NbkitError) -> None:
        self.ending = self.ending or error.what
        self._show(Progress("over", error.what, what=error.what, numbers=error.numbers, hint=error.hint))

    def end(self, why: str) -> None:
        """End the cluster soon."""
        self.ending = self.ending or why

    def _finish(self) -> None:
        print(f"{time.strftime('%H:%M:%S')} coordinator: ending the cluster: {self.ending}", flush=True)
        self._pass_on({"event": "end_all", "why": self.ending}, None)
        if self.state.phase != "over":
            self._show(Progress("over", self.ending))
        deadline = time.monotonic() + END_SECONDS
        while self.hosts and time.monotonic() < deadline:
            for key, _ in self.selector.select(TICK_SECONDS):
                if key.data is not None and key.data.link.receive() is None:
                    self.selector.unregister(key.data.link.sock)
                    self.hosts.pop(key.data.facts.get("index", -1), None)
        self.starter.end()
        # Who waits for the start is told why it failed, and ends the controller itself.
        if self.controller and (self.going or self._launcher is None or self._is_given_up()):
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
    try:
        starter = starter_of(loaded(plan["request"]), folder)
        coordinator = Coordinator(folder, plan, starter)
    except NbkitError as error:
        progress.write(folder, Progress("over", error.what, what=error.what, numbers=error.numbers, hint=error.hint))
        return
    coordinator.run()


if __name__ == "__main__":
    main()
