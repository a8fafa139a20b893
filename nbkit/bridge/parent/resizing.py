"""The number of ranks changes, as their parent sees it: who is forked, who waits, who leaves.

1. The ranks say that they wait, and for how many; the first to say so begins it. New ranks are forked.
2. When all wait, those of the new world are told to form it. The others go on waiting.
3. A rank says that all go on. The others are told to leave, and ended when their cell has.

It is given up where a rank dies or does not come in time. Then nothing has changed, unless the world was being formed.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbkit.bridge.parent.child_processes import kill_group
from nbkit.bridge.parent.parent_log import log
from nbkit.bridge.parent.spec import Spec, pins_of, write_pins

if TYPE_CHECKING:
    from nbkit.bridge.parent.parent import Child, Parent

WAIT_SECONDS = 60.0  # for every rank to stand, and for the new ones to start
LEAVE_SECONDS = 3.0  # for the cell of a rank that leaves to end


@dataclass
class Resizing:
    """One that is under way. before: the spec of the ranks that are there. pins: of all of the new world."""

    size: int
    cell: str
    pins: list[dict[str, Any]]
    before: Spec
    waits: dict[int, dict[str, Any]] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    formed: bool = False
    deadline: float = 0.0

    @property
    def newcomers(self) -> list[int]:
        return list(range(self.before.world_size, self.size))


class Resizer:
    """One per parent."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.under_way: Resizing | None = None
        self._leaving: dict[int, float] = {}  # rank -> until when its cell may go on

    def takes(self, child: Child, message: dict[str, Any]) -> bool:
        """Whether what a rank says is of this: it waits, or all go on."""
        if "size" in message and self.under_way is None:
            self._begin(message)
        if (resizing := self.under_way) is None:
            return False
        if message["event"] == "waits":
            resizing.waits[child.rank] = message
        else:
            self._end(message)
        return True

    def go_on(self) -> None:
        """Do what is due."""
        for rank, until in list(self._leaving.items()):
            child = self.parent.children.get(rank)
            if child is None or not child.cells or time.monotonic() > until:
                del self._leaving[rank]
                if child is not None:
                    child.dismissed = True
                    kill_group(child.pid)
                    self.parent.tell_hub(rank)
        resizing = self.under_way
        if resizing is None or resizing.formed or self.parent.ending:
            return
        for rank in sorted(set(resizing.newcomers) - resizing.started - set(self.parent.children)):
            resizing.started.add(rank)
            (self.parent.folder / f"rank{rank}.end.json").unlink(missing_ok=True)
            self.parent.start_rank(rank, replaces=True)
        if late := sorted(set(range(max(resizing.size, resizing.before.world_size))) - set(resizing.waits)):
            if time.monotonic() > resizing.deadline:
                self.give_up(f"ranks {late} were not ready within {WAIT_SECONDS:.0f} s")
            return
        resizing.formed = True
        word = {
            "do": "form",
            "size": resizing.size,
            "generation": max(said["generation"] for said in resizing.waits.values()) + 1,
            "address": resizing.waits[0]["address"],
            "port": resizing.waits[0]["port"],
            "newcomers": resizing.newcomers,
            "statement": seat.statement if (seat := self.parent.children[0].seat) is not None else -1,
            "pins": resizing.pins,
        }
        log(f"generation {word['generation']} is formed with {resizing.size} ranks")
        for child in self.parent.children.values():
            if child.rank < resizing.size:
                child.link.send(**word)

    def give_up(self, why: str, gone: Child | None = None) -> None:
        """All go on as they were, as far as they can. gone: the rank that has died; of a new one nobody is told."""
        resizing, self.under_way = self.under_way, None
        if resizing is None:
            return
        log(f"not resized: {why}")
        self.parent.spec = resizing.before
        write_pins(resizing.before, self.parent.folder / "spec.json")
        if gone is not None:
            gone.dismissed = gone.rank >= resizing.before.world_size
        for child in self.parent.children.values():
            if child.rank in resizing.started:
                child.dismissed = True
                kill_group(child.pid)
            elif child.rank < resizing.before.world_size:
                child.link.send(do="kept", why=why)

    def _begin(self, message: dict[str, Any]) -> None:
        parent, size = self.parent, message["size"]
        pins = message["pins"] or [asdict(pin) for pin in parent.spec.pins[:size]]
        resizing = self.under_way = Resizing(size, message["cell"], pins, parent.spec)
        resizing.deadline = time.monotonic() + WAIT_SECONDS
        parent.spec = replace(parent.spec, pins=pins_of(pins), world_size=size)
        write_pins(parent.spec, parent.folder / "spec.json")
        for rank in self._leaving:
            self._leaving[rank] = 0.0  # its number is wanted again

    def _end(self, told: dict[str, Any]) -> None:
        """A rank says that all go on."""
        resizing, self.under_way = self.under_way, None
        assert resizing is not None
        pids = {child.rank: child.pid for child in self.parent.children.values() if child.rank < resizing.size}
        seat = self.parent.children[0].seat
        about = {
            "n": resizing.size,
            "enters": seat is not None and seat.cell == resizing.cell,
            "pids": [pids[rank] for rank in sorted(pids)],
            "pins": resizing.pins,
            "newcomers": resizing.newcomers,
            "cell": resizing.cell,
            "said": told["said"],
            "when": time.time(),
        }
        path = self.parent.folder / "resized.json"
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(about))
        scratch.replace(path)
        for child in self.parent.children.values():
            if child.rank >= resizing.size:
                self._leaving[child.rank] = time.monotonic() + LEAVE_SECONDS
                child.link.send(do="leave")
            else:
                child.link.send(do="resized")
