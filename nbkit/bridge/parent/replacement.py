"""The replacement of ranks that died in a training, as their parent sees it: who is forked, who waits, how it ends.

1. A rank dies while all ranks make the steps of one `fit` that newcomers can enter (each has said so when it began).
   The survivors are broken out of their collectives, and wait; the newcomer is forked and registers its engine.
2. When everyone waits, all are told to form the next generation of the world. From here on nobody counts as dead.
3. A survivor says that the training goes on. Whoever dies before that begins the same again, for both.

It is given up where a survivor has left the training, nobody survives, one does not come in time, or the same rank has
died three times at one step: then the ranks are dead, as if nobody had tried. On several hosts the parent of the first
one sees to the ranks of all of them: see other_hosts.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from nbkit.bridge.parent.child_processes import kill_group
from nbkit.bridge.parent.parent_log import log

if TYPE_CHECKING:
    from nbkit.bridge.parent.other_hosts import RankElsewhere
    from nbkit.bridge.parent.parent import Child, Parent

    Member: TypeAlias = Child | RankElsewhere

WAIT_SECONDS = 60.0  # for every survivor to leave its step, and for the newcomers to start
SAME_STEP = 3  # deaths of one rank at one step that are its program's


@dataclass(frozen=True)
class Seat:
    """Where a newcomer can enter: the statement of the cell that calls `fit`."""

    cell: str
    statement: int


@dataclass
class Replacement:
    """One that is under way. deaths: rank -> what is told of its death. waits: rank -> what it said when it was ready
    to form the world. fresh: those that have died since it was formed last. starts: how often each rank was begun.
    devices: rank -> what is told of the device that it has got. left: who will not come."""

    seat: Seat
    deaths: dict[int, dict[str, Any]] = field(default_factory=dict)
    waits: dict[int, dict[str, Any]] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    starts: Counter[int] = field(default_factory=Counter)
    devices: dict[int, str] = field(default_factory=dict)
    left: str = ""
    formed: bool = False
    deadline: float = 0.0

    def add(self, death: dict[str, Any]) -> None:
        """A rank has died: whatever was formed is void, and all wait again."""
        rank = death["rank"]
        self.deaths[rank] = {**death, "cells": sorted({self.seat.cell, *(death["cells"] or ())})}
        self.fresh.add(rank)
        self.starts[rank] += 1
        self.waits.pop(rank, None)
        if self.formed:
            self.waits.clear()
        self.formed, self.deadline = False, time.monotonic() + WAIT_SECONDS

    @property
    def step(self) -> int:
        """The finished steps of the survivor that is least far."""
        return min((said["step"] for said in self.waits.values() if said["step"] >= 0), default=-1)

    def form(self) -> dict[str, Any]:
        """Everyone waits: what all are told."""
        self.formed = True
        self.fresh.clear()
        return {
            "do": "form",
            "generation": max(said["generation"] for said in self.waits.values()) + 1,
            "address": self.waits[0]["address"],
            "port": self.waits[0]["port"],
            "newcomers": sorted(self.deaths),
            "statement": self.seat.statement,
            "since": min(death["when"] for death in self.deaths.values()),
            "how": ", ".join(f"rank {rank} died ({death['how']})" for rank, death in sorted(self.deaths.items())),
            "devices": "; ".join(self.devices[rank] for rank in sorted(self.devices)),
        }


class Replacer:
    """One per parent; on several hosts the first host's sees to all ranks."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.under_way: Replacement | None = None
        self._died: list[tuple[str, int, int]] = []  # (cell, rank, finished steps), over all replacements
        self._stand: dict[tuple[int, int], float] = {}  # (rank, pid) -> seconds that it has waited for others
        self._hung: dict[tuple[int, int], str] = {}  # those that were ended for it -> how they ended

    def hear(self, child: Member, message: dict[str, Any]) -> None:
        """A rank is in a `fit` that can be entered, or is not any more; it waits; the training goes on."""
        if message["event"] == "seat" and message["cell"]:
            child.seat = Seat(message["cell"], message["statement"])
        elif message["event"] == "seat":
            self.leave(child, message["why"])
        elif message["event"] == "waits" and self.under_way:
            self.under_way.waits[child.rank] = message
        elif message["event"] == "replaced":
            self._end(message)
        elif message["event"] == "stands":
            self._stand[child.rank, child.pid] = message["seconds"]
            if message["due"]:
                self._end_hung(message["seconds"])

    def _end_hung(self, seconds: float) -> None:
        """Some ranks have waited for others for so long: end those that do not wait. None where all do."""
        members = list(self.parent.members.values())
        moves = [child for child in members if not self._stand.get((child.rank, child.pid))]
        in_step = all(child.seat is not None and not child.dismissed for child in members)
        if self.under_way or not in_step:
            return
        for child in moves:
            self._hung[child.rank, child.pid] = f"it hung, and was ended after {seconds:.0f} s"
            log(f"rank {child.rank} hangs: the others have waited for {seconds:.0f} s, and it is ended")
            if child.rank in self.parent.children:
                kill_group(child.pid)
            elif self.parent.coordinator is not None:
                self.parent.coordinator.link.send(event="end", rank=child.rank, cell="")

    def leave(self, child: Member, why: str = "") -> None:
        """A rank has left the training; if others wait to go on with it, they wait in vain."""
        child.seat = None
        if self.under_way and not self._is_new(child):
            # Acted on when all that has come is read: another one may have said before that the training goes on.
            self.under_way.left = self.under_way.left or why or f"rank {child.rank} has left the training"

    def placed(self, rank: int, said: str) -> None:
        """What is told of the device that a new rank has got; "" where it is the one of before."""
        if said and self.under_way:
            self.under_way.devices[rank] = said

    def lost(self, rank: int, how: str) -> None:
        """The host of a rank is gone, and the rank with it: no other one takes its place."""
        if self.under_way:
            self.under_way.left = self.under_way.left or f"rank {rank} is lost: {how}"

    def takes(self, child: Member, death: dict[str, Any]) -> bool:
        """Whether the death of `child` is seen to here: its rank is replaced, or a replacement has failed by it."""
        parent, replacement = self.parent, self.under_way
        self._stand.pop((child.rank, child.pid), None)
        death["how"] = self._hung.pop((child.rank, child.pid), death["how"])
        # One that is being ended, such as a new rank of a resize that was given up, is no part of the training.
        there = [other for other in parent.members.values() if not other.dismissed]
        survivors = [other for other in there if not self._is_new(other)]
        seats = {other.seat for other in survivors} | (set() if self._is_new(child) else {child.seat})
        seat = seats.pop() if survivors and len(seats) == 1 else None
        if parent.end_in_order.why or seat is None:
            if replacement is None:
                return False
            replacement.add(death)
            self._give_up(f"rank {child.rank} died as well")
            return True
        replacement = self.under_way = replacement or Replacement(seat)
        if replacement.formed:  # what the newcomers have begun is void
            self._dismiss(replacement.deaths)
        replacement.add(death)
        if replacement.starts[child.rank] > SAME_STEP:
            self._give_up(f"rank {child.rank} ended {SAME_STEP} times while it was replaced")
            return True
        parent.note(death, replaced="under way")
        for other in survivors:
            other.link.send(do="died", replaced=True, **death)
        self.go_on()
        return True

    def go_on(self) -> None:
        """Do what is due in a replacement that is under way."""
        parent, replacement = self.parent, self.under_way
        if replacement is None or parent.ending:
            return
        if replacement.left:
            self._give_up(replacement.left)
            return
        if replacement.formed:
            return
        for rank in sorted(set(replacement.deaths) - set(parent.members)):
            parent.elsewhere.begin(rank, replacement.seat.cell, replacement.deaths[rank])
        if late := sorted(set(range(parent.spec.world_size)) - set(replacement.waits)):
            if time.monotonic() > replacement.deadline:
                self._give_up(f"ranks {late} were not ready to go on within {WAIT_SECONDS:.0f} s")
            return
        if why := self._too_often(replacement):
            self._give_up(why)
            return
        word = replacement.form()
        log(f"generation {word['generation']} is formed with new ranks {word['newcomers']}")
        for child in parent.members.values():
            child.link.send(**word)

    def _too_often(self, replacement: Replacement) -> str:
        """Why one of the ranks that have died is not replaced once more, or ""."""
        cell, step = replacement.seat.cell, replacement.step
        for rank in replacement.fresh:
            self._died.append((cell, rank, step))
            # A survivor may have made the step that another one was broken out of.
            same = sum(where == [cell, rank] and abs(when - step) <= 1 for *where, when in self._died)
            if same >= SAME_STEP:
                return f"rank {rank} has died {same} times at step {step + 1}, so it is the program"
        return ""

    def _end(self, told: dict[str, Any]) -> None:
        """A survivor says that the training goes on: nobody is dead any more."""
        replacement, self.under_way = self.under_way, None
        if replacement is None:
            return
        for rank, death in replacement.deaths.items():
            about = {"by": replacement.waits[rank]["process"], "cell": replacement.seat.cell, "said": told["said"]}
            self.parent.note(death, replaced="done", **about)
        for child in self.parent.members.values():
            child.link.send(do="replaced")

    def _give_up(self, why: str) -> None:
        """The ranks that died are dead, and the survivors' cell ends as it does without a replacement."""
        replacement, self.under_way = self.under_way, None
        assert replacement is not None
        log(f"no replacement: {why}")
        self._dismiss(replacement.deaths)
        for child in self.parent.members.values():
            child.link.send(do="kept", why=why)
        for death in replacement.deaths.values():
            death |= {"how": f"{death['how']}; not replaced: {why}"}
            self.parent.declare_dead(death)

    def _is_new(self, child: Member) -> bool:
        return self.under_way is not None and child.rank in self.under_way.deaths

    def _dismiss(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if child := self.parent.members.get(rank):
                child.dismiss()
