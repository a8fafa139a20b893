"""The parent's side of replacing ranks that died in a training (`Replacer`), and of resizing (`Resizer`).

Replacing a rank (the ranks that live are survivors, the new process is a newcomer):

1. All ranks have reported that they run a `fit` that newcomers can enter, and one rank dies. The survivors are broken
   out of their collectives and wait. The newcomer is forked and registers its engine.
2. When everyone waits, all are told to form the next generation of the world. From here on nobody counts as dead.
3. A survivor reports that the training goes on. If another rank dies before that, all steps are repeated for both.

A replacement is given up if a survivor has left the training, if nobody survives, if a rank does not come in time, or
if the same rank has died three times at one step. Then the ranks that died are dead. On several hosts the parent of the
first host handles the ranks of all hosts: see other_hosts.py.

Changing the number of ranks:

1. The ranks report that they wait, and for which number of ranks. The first report begins the resize. New ranks are
   forked.
2. When all wait, the ranks of the new world are told to form it. The others go on waiting.
3. A rank reports that all go on. The others are told to leave, and are ended when their cell has ended.

A resize is given up if a rank dies or does not come in time. Then nothing has changed, unless the world was being
formed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from nbkit.bridge.parent.child_processes import kill_group, log
from nbkit.bridge.parent.spec import EngineSpec, pins_of, write_pins
from nbkit.wire import cluster_end
from nbkit.wire.messages import (
    Death,
    EndRank,
    FitEntered,
    FitLeft,
    FormResizedWorld,
    FormWorld,
    ForParent,
    GivenUp,
    LeaveWorld,
    RankEnd,
    RankIsReplaced,
    RanksChanged,
    ReadyToForm,
    SizeChange,
    TrainingGoesOn,
    WaitsForOthers,
    WantedSize,
    handles,
)

if TYPE_CHECKING:
    from nbkit.bridge.parent.other_hosts import RankElsewhere
    from nbkit.bridge.parent.parent import Child, Parent

    Member: TypeAlias = Child | RankElsewhere

WAIT_SECONDS = 60.0  # for every survivor to leave its step, and for the newcomers to start
SAME_STEP = 3  # this many deaths of one rank at one step are blamed on the program


@dataclass
class Replacement:
    """A replacement that is under way.

    deaths: rank -> its death. waits: rank -> its message that it is ready to form the world. fresh: ranks that have
    died since the world was last formed. starts: rank -> how often a newcomer was started for it. devices: rank -> the
    sentence about its new device. left: why a rank has left the training, or "".
    """

    fit: FitEntered
    deaths: dict[int, Death] = field(default_factory=dict)
    waits: dict[int, ReadyToForm] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    starts: Counter[int] = field(default_factory=Counter)
    devices: dict[int, str] = field(default_factory=dict)
    left: str = ""
    formed: bool = False
    deadline: float = 0.0

    def add(self, death: Death) -> None:
        """Add a rank that has died. A world that was formed is void, and all ranks have to wait again."""
        rank = death.rank
        self.deaths[rank] = replace(death, cells=tuple(sorted({self.fit.cell, *(death.cells or ())})))
        self.fresh.add(rank)
        self.starts[rank] += 1
        self.waits.pop(rank, None)
        if self.formed:
            self.waits.clear()
        self.formed, self.deadline = False, time.monotonic() + WAIT_SECONDS

    @property
    def step(self) -> int:
        """Return the smallest number of finished steps of a survivor; -1 if it is unknown."""
        return min((ready.step for ready in self.waits.values() if ready.step >= 0), default=-1)

    def form(self) -> FormWorld:
        """Return the message to all ranks to form the world. Called when everyone waits."""
        self.formed = True
        self.fresh.clear()
        return FormWorld(
            generation=max(ready.generation for ready in self.waits.values()) + 1,
            address=self.waits[0].address,
            port=self.waits[0].port,
            newcomers=tuple(sorted(self.deaths)),
            statement=self.fit.statement,
            how=", ".join(f"rank {rank} died ({death.how})" for rank, death in sorted(self.deaths.items())),
            since=min(death.when for death in self.deaths.values()),
            devices="; ".join(self.devices[rank] for rank in sorted(self.devices)),
        )


class Replacer:
    """Replaces ranks. There is one object per parent. On several hosts, the first host's object handles all ranks."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.under_way: Replacement | None = None
        self._died: list[tuple[str, int, int]] = []  # (cell, rank, finished steps), over all replacements
        self._waited: dict[tuple[int, int], float] = {}  # (rank, pid) -> seconds for which it has waited for others
        self._hung: dict[tuple[int, int], str] = {}  # (rank, pid) that was ended because it hung -> how it ended

    @handles(FitEntered)
    def _on_fit_entered(self, entered: FitEntered, child: Member) -> None:
        child.fit = entered

    @handles(FitLeft)
    def _on_fit_left(self, left: FitLeft, child: Member) -> None:
        self.leave(child, left.why)

    @handles(ReadyToForm)
    def _on_ready_to_form(self, ready: ReadyToForm, child: Member) -> None:
        if self.under_way:
            self.under_way.waits[child.rank] = ready

    @handles(WaitsForOthers)
    def _on_wait(self, waits: WaitsForOthers, child: Member) -> None:
        self._waited[child.rank, child.pid] = waits.seconds
        if waits.due:
            self._end_hung(waits.seconds)

    def _end_hung(self, seconds: float) -> None:
        """End the ranks that do not wait, after the others have waited for `seconds`. If all wait, none is ended."""
        members = list(self.parent.members.values())
        moves = [child for child in members if not self._waited.get((child.rank, child.pid))]
        in_step = all(child.fit is not None and not child.dismissed for child in members)
        if self.under_way or not in_step:
            return
        for child in moves:
            self._hung[child.rank, child.pid] = f"it hung, and was ended after {seconds:.0f} s"
            log(f"rank {child.rank} hangs: the others have waited for {seconds:.0f} s, and it is ended")
            if child.rank in self.parent.children:
                kill_group(child.pid)
            elif self.parent.coordinator is not None:
                self.parent.coordinator.link.send(EndRank(child.rank))

    def leave(self, child: Member, why: str = "") -> None:
        """Note that a rank has left the training. If the others wait for it, the replacement is given up."""
        child.fit = None
        if self.under_way and not self._is_new(child):
            # `go_on` acts on it, after all messages are read: another rank may have said that the training goes on.
            self.under_way.left = self.under_way.left or why or f"rank {child.rank} has left the training"

    def placed(self, rank: int, said: str) -> None:
        """Note the sentence `said` about the device of a new rank; "" if it is the same device as before."""
        if said and self.under_way:
            self.under_way.devices[rank] = said

    def lost(self, rank: int, how: str) -> None:
        """Note that a rank is gone together with its host. It is not replaced."""
        if self.under_way:
            self.under_way.left = self.under_way.left or f"rank {rank} is lost: {how}"

    def explained(self, child: Member, death: Death) -> Death:
        """Return the death. If the rank was ended because it hung, say so in it."""
        return replace(death, how=self._hung.pop((child.rank, child.pid), death.how))

    def takes(self, child: Member, death: Death) -> bool:
        """Handle the death of `child`. Returns True if its rank is replaced, or if its death ends a replacement."""
        parent, replacement = self.parent, self.under_way
        self._waited.pop((child.rank, child.pid), None)
        # A dismissed rank, such as a new rank of a resize that was given up, is not part of the training.
        there = [other for other in parent.members.values() if not other.dismissed]
        survivors = [other for other in there if not self._is_new(other)]
        fits = {other.fit for other in survivors} | (set() if self._is_new(child) else {child.fit})
        fit = fits.pop() if survivors and len(fits) == 1 else None
        if parent.end_in_order.why or fit is None:
            if replacement is None:
                return False
            replacement.add(death)
            self._give_up(f"rank {child.rank} died as well")
            return True
        replacement = self.under_way = replacement or Replacement(fit)
        if replacement.formed:  # the newcomers have to start again
            self._dismiss(replacement.deaths)
        replacement.add(death)
        if replacement.starts[child.rank] > SAME_STEP:
            self._give_up(f"rank {child.rank} ended {SAME_STEP} times while it was replaced")
            return True
        parent.note(RankEnd(**asdict(death), replaced="under way"))
        for other in survivors:
            other.link.send(RankIsReplaced(death))
        self.go_on()
        return True

    def go_on(self) -> None:
        """Do the next step of the replacement, if it is due."""
        parent, replacement = self.parent, self.under_way
        if replacement is None or parent.ending:
            return
        if replacement.left:
            self._give_up(replacement.left)
            return
        if replacement.formed:
            return
        for rank in sorted(set(replacement.deaths) - set(parent.members)):
            parent.elsewhere.begin(rank, replacement.fit.cell, replacement.deaths[rank])
        if late := sorted(set(range(parent.spec.world_size)) - set(replacement.waits)):
            if time.monotonic() > replacement.deadline:
                self._give_up(f"ranks {late} were not ready to go on within {WAIT_SECONDS:.0f} s")
            return
        if why := self._too_often(replacement):
            self._give_up(why)
            return
        form = replacement.form()
        log(f"generation {form.generation} is formed with new ranks {[*form.newcomers]}")
        for child in parent.members.values():
            child.link.send(form)

    def _too_often(self, replacement: Replacement) -> str:
        """Return why one of the dead ranks is not replaced again, or ""."""
        cell, step = replacement.fit.cell, replacement.step
        for rank in replacement.fresh:
            self._died.append((cell, rank, step))
            # One survivor may have finished the step in which another survivor was interrupted.
            same = sum(where == [cell, rank] and abs(when - step) <= 1 for *where, when in self._died)
            if same >= SAME_STEP:
                return f"rank {rank} has died {same} times at step {step + 1}, so it is the program"
        return ""

    @handles(TrainingGoesOn)
    def _on_training_goes_on(self, told: TrainingGoesOn, _: Member) -> None:
        """End the replacement: nobody is dead any more."""
        replacement, self.under_way = self.under_way, None
        if replacement is None:
            return
        for rank, death in replacement.deaths.items():
            by, cell = replacement.waits[rank].process, replacement.fit.cell
            self.parent.note(RankEnd(**asdict(death), replaced="done", by=by, cell=cell, said=told.said))
        for child in self.parent.members.values():
            child.link.send(RanksChanged())

    def _give_up(self, why: str) -> None:
        """Give up: the ranks that died are dead, and the survivors' cell ends as without a replacement."""
        replacement, self.under_way = self.under_way, None
        assert replacement is not None
        log(f"no replacement: {why}")
        self._dismiss(replacement.deaths)
        for child in self.parent.members.values():
            child.link.send(GivenUp(why))
        for death in replacement.deaths.values():
            self.parent.declare_dead(replace(death, how=f"{death.how}; not replaced: {why}"))

    def _is_new(self, child: Member) -> bool:
        return self.under_way is not None and child.rank in self.under_way.deaths

    def _dismiss(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if child := self.parent.members.get(rank):
                child.dismiss()


RESIZE_WAIT_SECONDS = 60.0  # for every rank to wait, and for the new ones to start
LEAVE_SECONDS = 3.0  # for the cell of a rank that leaves to end


@dataclass
class ResizeUnderWay:
    """A resize that is under way. before: the spec of the current ranks. pins: of all ranks of the new world."""

    size: int
    cell: str
    pins: tuple[dict[str, Any], ...]
    before: EngineSpec
    waits: dict[int, ReadyToForm] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    formed: bool = False
    deadline: float = 0.0

    @property
    def newcomers(self) -> list[int]:
        return list(range(self.before.world_size, self.size))


class Resizer:
    """Changes the number of ranks. There is one per parent."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.under_way: ResizeUnderWay | None = None
        self._leaving: dict[int, float] = {}  # rank -> time until which its cell may go on

    def takes(self, child: Child, message: ForParent) -> bool:
        """Handle ReadyToForm or TrainingGoesOn of a rank. Returns False if it is not about a resize."""
        ready = message if isinstance(message, ReadyToForm) else None
        if ready and ready.resize and self.under_way is None:
            self._begin(ready.resize)
        if (resizing := self.under_way) is None:
            return False
        if ready:
            resizing.waits[child.rank] = ready
        elif isinstance(message, TrainingGoesOn):
            self._end(message)
        return True

    def go_on(self) -> None:
        """Do the next step of the resize, if it is due, and end ranks that have to leave."""
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
                self.give_up(f"ranks {late} were not ready within {RESIZE_WAIT_SECONDS:.0f} s")
            return
        resizing.formed = True
        form = FormResizedWorld(
            generation=max(ready.generation for ready in resizing.waits.values()) + 1,
            address=resizing.waits[0].address,
            port=resizing.waits[0].port,
            newcomers=tuple(resizing.newcomers),
            statement=fit.statement if (fit := self.parent.children[0].fit) is not None else -1,
            size=resizing.size,
            pins=resizing.pins,
        )
        log(f"generation {form.generation} is formed with {resizing.size} ranks")
        for child in self.parent.children.values():
            if child.rank < resizing.size:
                child.link.send(form)

    def give_up(self, why: str, gone: Child | None = None) -> None:
        """Give up: all ranks go on as before, if they can. gone: a rank that died. It is reported unless it is new."""
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
                child.link.send(GivenUp(why))

    def _begin(self, wanted: WantedSize) -> None:
        parent, size = self.parent, wanted.size
        pins = wanted.pins or tuple(asdict(pin) for pin in parent.spec.pins[:size])
        resizing = self.under_way = ResizeUnderWay(size, wanted.cell, pins, parent.spec)
        resizing.deadline = time.monotonic() + RESIZE_WAIT_SECONDS
        parent.spec = replace(parent.spec, pins=pins_of(pins), world_size=size)
        write_pins(parent.spec, parent.folder / "spec.json")
        for rank in self._leaving:
            self._leaving[rank] = 0.0  # a new rank will have its number

    def _end(self, told: TrainingGoesOn) -> None:
        """End the resize, since a rank has reported that all go on."""
        resizing, self.under_way = self.under_way, None
        assert resizing is not None
        pids = {child.rank: child.pid for child in self.parent.children.values() if child.rank < resizing.size}
        fit = self.parent.children[0].fit
        change = SizeChange(
            n=resizing.size,
            pids=tuple(pids[rank] for rank in sorted(pids)),
            pins=resizing.pins,
            newcomers=tuple(resizing.newcomers),
            cell=resizing.cell,
            enters=fit is not None and fit.cell == resizing.cell,
            said=told.said,
            when=time.time(),
        )
        cluster_end.write_size(self.parent.folder, change)
        for child in self.parent.children.values():
            if child.rank >= resizing.size:
                self._leaving[child.rank] = time.monotonic() + LEAVE_SECONDS
                child.link.send(LeaveWorld())
            else:
                child.link.send(RanksChanged())
