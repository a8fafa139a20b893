"""Find out why a cell makes no progress: which ranks wait, in which operation, and for which ranks.

- `collect` asks every rank for its activity, and inspects those that do not answer from outside. It takes a few seconds
  in any case.
- `first_mismatch` and `skipped` find where ranks of a group issued different operations: another operation, size, type,
  order or number.
- `verdict` makes a sentence of this. It is a pure function of the states.
- `Why` is the output of `%nbkit why`: the sentence, a row for each rank, and the stacks if requested.
- `QuietWatch` shows the sentence in a cell's output when nothing has moved for a while.
"""

from __future__ import annotations

import base64
import html
import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as settle
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from nbkit.durations import text_of
from nbkit.figures import html_table
from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.cells.execution import Execution
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.status import text_table
from nbkit.wire import process_state
from nbkit.wire.activity import ANYONE, Activity, CodeLine, GroupLog, Operation
from nbkit.wire.cells import ranks_named
from nbkit.wire.messages import Death, GetActivity, GetProgress, LookAtProcesses
from nbkit.wire.process_state import ProcessState
from nbkit.wire.user_code import is_users

StateKind = Literal["answers", "native", "stopped", "silent", "dead"]


@dataclass(frozen=True)
class RankState:
    """The state of one rank, from its own answer or as seen from outside.

    kind: "answers"; "native": it holds the interpreter lock; "stopped": its process is suspended; "silent": nothing
    else is known; "dead". how: the state in words, for a rank that does not answer. line: the current line of the
    user's code. activity: the answer, None without one. stacks: text, "" if not requested.
    """

    rank: int
    kind: StateKind
    how: str = ""
    line: CodeLine | None = None
    activity: Activity | None = None
    stacks: str = ""

    @property
    def waits(self) -> Operation | None:
        """Return the operation in which the rank waits, or None."""
        return self.activity.waits if self.activity else None

    def log(self, group: str) -> GroupLog | None:
        """Return the operations that it has issued in a group; None if they are not known."""
        return self.activity.groups.get(group) if self.activity else None

    @property
    def idle(self) -> bool:
        """Return True if it runs no cell."""
        return self.activity is not None and self.activity.cell is None

    @property
    def prompt(self) -> str:
        """Return why it waits for a typed line, "" if it does not."""
        return self.activity.prompt if self.activity else ""

    def is_doing(self) -> str:
        """Return its activity as the rest of a sentence after its name: "is in time.sleep, cell 9 line 4"."""
        if self.kind != "answers" or self.activity is None:
            return f"{self.how}, {self.line}" if self.line else self.how
        if self.prompt:
            at = f", {self.line}" if self.line else ""
            return f"is at a breakpoint{at}" if self.prompt == "breakpoint" else "is looked at with %nbkit debug"
        if self.idle:
            return "has ended its cell"
        if self.waits:
            return f"waits in {self.waits.name}"
        line = self.line
        where = f", {line}" if line else ""
        if self.activity.reads_data:
            return f"reads data{where}"
        if line is None:
            return "runs code that is no user's"
        return f"is in {line.calls}{where}" if line.calls else f"runs {line}"


ANSWER_SECONDS = 1.0  # a free interpreter answers in milliseconds
LOOK_SECONDS = 1.0
LATE_SECONDS = 1.0  # for a late answer, after the look from outside


def collect(
    entry: ClusterEntry, client: Client, deaths: Mapping[int, Death], *, stacks: bool = False
) -> dict[int, RankState]:
    """Return the state of each rank. Can be called from any thread. stacks: include the stack of every thread."""
    alive = [rank for rank in range(entry.n) if rank not in deaths]
    replies = client.request(alive, GetActivity(stacks))
    settle(replies.values(), ANSWER_SECONDS)
    if silent := [rank for rank in alive if not _has_come(replies, rank)]:
        looks = looks_from_outside(entry, client, silent, [rank for rank in alive if rank not in silent])
        settle([replies[rank] for rank in silent if rank in replies and rank not in looks], LATE_SECONDS)
    else:
        looks = {}
    answers = {rank: activity_in(replies[rank].result()["content"]) for rank in alive if _has_come(replies, rank)}
    return states_of(range(entry.n), answers, looks, deaths, stacks=stacks)


def states_of(
    ranks: Iterable[int],
    answers: Mapping[int, Activity],
    looks: Mapping[int, ProcessState],
    deaths: Mapping[int, Death],
    *,
    stacks: bool,
) -> dict[int, RankState]:
    """Return the state of each rank, from its answer, or from the look from outside if it did not answer."""
    states = {rank: RankState(rank, "dead", f"is dead ({death.how})") for rank, death in deaths.items()}
    cells = {PurePath(file).name: number for each in answers.values() for file, number in each.cells.items()}
    for rank in ranks:
        if rank in states:
            continue
        answer = answers.get(rank)
        if answer is not None:
            states[rank] = RankState(rank, "answers", "", answer.line, answer, answer.stacks)
        else:
            seen = _from_outside(rank, looks.get(rank), cells)
            states[rank] = seen if stacks else replace(seen, stacks="")
    return dict(sorted(states.items()))


def _has_come(replies: Mapping[int, Future[Any]], rank: int) -> bool:
    reply = replies.get(rank)
    return (
        reply is not None and reply.done() and reply.exception() is None and reply.result()["content"]["status"] == "ok"
    )


def activity_in(answer: Mapping[str, Any]) -> Activity:
    """Return the Activity in a rank's answer to GetActivity."""
    found = pickle.loads(base64.b64decode(answer["activity"]))
    assert isinstance(found, Activity)
    return found


def looks_from_outside(
    entry: ClusterEntry, client: Client, silent: Iterable[int], answering: list[int]
) -> dict[int, ProcessState]:
    """Return the states of processes that do not answer, as seen from outside.

    Processes on this host are inspected directly, and others by an answering rank on their host. The result leaves out
    processes that cannot be inspected.
    """
    silent = [rank for rank in silent if rank < len(entry.ranks)]  # a cluster that is starting has no processes yet
    if entry.is_here and not entry.is_spread:
        logs = entry.folder / "logs"
        deadline = time.monotonic() + LOOK_SECONDS
        looks = {}
        for rank in silent:
            left = max(0.1, deadline - time.monotonic())
            if found := process_state.look(entry.ranks[rank], logs / f"rank{rank}.log", left):
                looks[rank] = found
        return looks
    asked = LookAtProcesses(tuple(silent), tuple(entry.ranks[rank] for rank in silent))
    answers = client.ask(answering, asked, 2 * LOOK_SECONDS)
    return {
        rank: found
        for answer in answers.values()
        for rank, found in pickle.loads(base64.b64decode(answer["looks"])).items()
    }


def _from_outside(rank: int, look: ProcessState | None, cells: Mapping[str, int]) -> RankState:
    if look is None:
        return RankState(rank, "silent", "does not answer")
    if look.stopped:
        return RankState(rank, "stopped", "is stopped by the system (SIGSTOP, or a debugger)")
    users = next((frame for frame in look.stack if is_users(frame.file)), None)
    line = None
    if users is not None:
        line = CodeLine(users.file, users.line, users.function, cells.get(PurePath(users.file).name, 0))
    stack = "\n".join(f'  File "{each.file}", line {each.line}, in {each.function}' for each in look.stack)
    how = "is in native code that keeps the interpreter to itself"
    if look.state != "running":
        how += f" ({look.state}{look.kernel and f', in {look.kernel}'})"
    return RankState(rank, "native", how, line, stacks=f"main thread, innermost first:\n{stack}\n" if stack else "")


# Some backends allow different sizes per rank here. For others, NCCL hangs, and gloo mixes data up or ends the process.
_SEVERAL_SIZES = ("all_gather", "gather", "scatter", "reduce_scatter")


@dataclass(frozen=True)
class Mismatch:
    """The first place where the operations of ranks differ.

    what: the property that differs. sides: (operation, ranks that issued it), the most common first. missing: ranks
    that left the first side's operation out, and went on.
    """

    what: str
    sides: tuple[tuple[Operation, tuple[int, ...]], ...]
    missing: tuple[int, ...] = ()

    @property
    def odd(self) -> tuple[int, ...]:
        """Return the ranks in the minority, or all of them if two sides are equally common."""
        if self.missing:
            return self.missing
        most = len(self.sides[0][1])
        tied = sum(len(ranks) == most for _, ranks in self.sides) > 1
        return tuple(sorted(rank for _, ranks in self.sides[0 if tied else 1 :] for rank in ranks))


def first_mismatch(states: Mapping[int, RankState], group: str) -> Mismatch | None:
    """Return the first collective of a group that differs between ranks, within the operations that they remember."""
    by_number: dict[int, dict[int, Operation]] = {}
    for rank, state in states.items():
        for operation in log.operations if (log := state.log(group)) is not None else ():
            by_number.setdefault(operation.number, {})[rank] = operation
    waited = {each.waits.number for each in states.values() if each.waits is not None and each.waits.group == group}
    for number, issued in sorted(by_number.items()):
        what = _first_difference(list(issued.values()))
        harmless = what == "size" and number not in waited and issued[min(issued)].op in _SEVERAL_SIZES
        if what and not harmless:
            return skipped(states, group) or Mismatch(what, _sides(issued))
    return None


def message_mismatch(sent: Operation, received: Operation, sender: int, receiver: int) -> Mismatch | None:
    """Return how the two ends of a message differ, or None if they agree."""
    if sent.tag != received.tag:
        what = "tag"
    elif sent.bytes != received.bytes:
        what = "size"
    elif sent.dtype != received.dtype:
        what = "dtype"
    else:
        return None
    return Mismatch(what, ((sent, (sender,)), (received, (receiver,))))


def _first_difference(operations: Sequence[Operation]) -> str:
    """Return the first property in which the operations differ, or ""."""
    first = operations[0]
    if any(other.op != first.op for other in operations):
        return "operation"
    if any(other.root != first.root for other in operations):
        return "root"
    # A barrier, or a rank that passes no tensor, has no dtype.
    if len({other.dtype for other in operations if other.dtype}) > 1:
        return "dtype"
    if first.op != "all_to_all" and any(other.bytes != first.bytes for other in operations):
        return "size"
    return ""


def _sides(issued: Mapping[int, Operation]) -> tuple[tuple[Operation, tuple[int, ...]], ...]:
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, operation in sorted(issued.items()):
        found.setdefault((*_kind(operation), operation.root), []).append(rank)
    return tuple(
        (issued[ranks[0]], tuple(ranks)) for ranks in sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))
    )


def skipped(states: Mapping[int, RankState], group: str) -> Mismatch | None:
    """Return the operations that some ranks left out, or None.

    Such a rank has issued fewer operations, and would have issued the same as the others with one stretch of operations
    inserted. The stretch is not at the end, because those may still come.
    """
    logs = {rank: log for rank, state in states.items() if (log := state.log(group)) is not None and log.operations}
    most = max((log.issued for log in logs.values()), default=0)
    full = next((log for log in logs.values() if log.issued == most), None)
    if full is None:
        return None
    found: dict[int, list[int]] = {}
    for rank, log in logs.items():
        lacking = most - log.issued
        if lacking and (at := _stretch_left_out(full.operations, log.operations, lacking)) is not None:
            found.setdefault(at, []).append(rank)
    if not found:
        return None
    at, missing = min(found.items())
    left_out = full.operations[at]
    have = tuple(rank for rank, log in logs.items() if rank not in missing and log.issued >= left_out.number)
    return Mismatch("number", ((left_out, have),), tuple(missing))


def _stretch_left_out(full: Sequence[Operation], short: Sequence[Operation], lacking: int) -> int | None:
    """Return the index in `full` of `lacking` operations without which it equals `short`.

    Return None if there is no such index, or if the operations are at the end.
    """
    start = max(full[0].number, short[0].number)
    long = [operation for operation in full if operation.number >= start]
    less = [operation for operation in short if operation.number >= start]
    if len(long) - len(less) != lacking:
        return None
    at = next((i for i, (one, other) in enumerate(zip(long, less, strict=False)) if _kind(one) != _kind(other)), None)
    if at is None or list(map(_kind, long[at + lacking :])) != list(map(_kind, less[at:])):
        return None
    return at + len(full) - len(long)


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.op, operation.bytes, operation.dtype, _place(operation)


def _place(operation: Operation) -> tuple[object, ...]:
    line = operation.line
    return () if line is None else (line.cell, line.cell or line.file, line.line)


Kind = Literal["mismatch", "late", "circle", "held", "prompt", "free"]
_UNDER_WAY_SECONDS = 5.0  # an operation that all ranks have reached takes less
_CLAUSES = 4  # at most in a sentence


@dataclass(frozen=True)
class HangVerdict:
    """The conclusion from all ranks' states.

    kind: "mismatch": ranks issued different operations; "late": some wait for ranks that do not wait; "circle": they
    wait for each other; "held": a rank is stopped or does not answer, or a complete operation does not end; "prompt":
    some wait for a rank at which a person types; "free": none of these. ranks: the ranks that are the cause.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()

    @property
    def stuck(self) -> bool:
        """Return True unless the kind is "free" or "prompt"."""
        return self.kind not in ("free", "prompt")


def verdict(states: Mapping[int, RankState]) -> HangVerdict:
    """Return the conclusion from the states of all ranks."""
    found = _found(states)
    return replace(found, sentence=found.sentence + _split_model_sentence(states)) if found.stuck else found


def _found(states: Mapping[int, RankState]) -> HangVerdict:
    waiting = {rank: state.waits for rank, state in sorted(states.items()) if state.waits is not None}
    if not waiting:
        return _nobody_waits(states)
    blockers = {rank: _blockers(rank, operation, states) for rank, operation in waiting.items()}
    if (mismatch := _mismatch(waiting, blockers, states)) is not None:
        return HangVerdict("mismatch", _mismatch_sentence(mismatch, waiting), mismatch.odd)
    causes = _causes(waiting, blockers)
    if causes:
        kind: Kind = "prompt" if all(states[rank].prompt for rank in causes) else "late"
        return HangVerdict(
            kind, _sentence([*_wait_clauses(waiting), *_activity_clauses(causes, states, waiting)]), causes
        )
    if all(blockers.values()):
        ending = "each waits for another one of them"
        if len({operation.group for operation in waiting.values() if operation.peer is None}) > 1:
            ending += ", for they do not issue these in the same order"
        return HangVerdict("circle", f"{_sentence(_wait_clauses(waiting))[:-1]}: {ending}.", tuple(waiting))
    # Name only the operations that all their ranks have reached: they block the ranks that wait for those ranks.
    first = {rank: operation for rank, operation in waiting.items() if not blockers[rank]}
    long = max(operation.seconds for operation in first.values()) > _UNDER_WAY_SECONDS
    under_way = "all ranks of it have come: it is under way" + (", or the network holds it" if long else "")
    return HangVerdict("held" if long else "free", _sentence([*_wait_clauses(waiting), under_way]))


def _nobody_waits(states: Mapping[int, RankState]) -> HangVerdict:
    held = tuple(rank for rank, state in sorted(states.items()) if state.kind != "answers")
    if all(state.idle for state in states.values()):
        return HangVerdict("free", "No cell runs.")
    readers = tuple(
        rank for rank, state in sorted(states.items()) if state.activity is not None and state.activity.reads_data
    )
    return HangVerdict("held" if held else "free", _sentence(_activity_clauses(states, states, {})), held or readers)


# Who waits for whom ---------------------------------------------------------------------------------------------------


def _blockers(rank: int, operation: Operation, states: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the ranks that have not reached the operation in which `rank` waits."""
    others = [other for other in operation.members if other != rank and other in states]
    if not operation.group:  # all ranks meet without a collective, to create a group or for a fit
        return tuple(other for other in others if not _comes_too(states[other], operation))
    if operation.peer is None:
        return tuple(other for other in others if _issued(states[other], operation.group) < operation.number)
    if operation.peer == ANYONE:
        return tuple(others)
    met = _other_end(states.get(operation.peer), rank, operation)
    return () if met >= operation.number else (operation.peer,)


def _comes_too(state: RankState, operation: Operation) -> bool:
    waits = state.waits
    return waits is not None and (waits.op, waits.number) == (operation.op, operation.number)


def _issued(state: RankState, group: str) -> int:
    log = state.log(group)
    return log.issued if log is not None else 0


def _other_end(state: RankState | None, rank: int, operation: Operation) -> int:
    """Return how many matching sends or receives the other rank has issued for `rank`'s message."""
    log = state.log(operation.group) if state is not None else None
    if log is None:
        return 0
    if operation.op == "send":  # a receive from any rank may have taken this message
        return log.received.get(rank, 0) + log.received.get(ANYONE, 0)
    return log.sent.get(rank, 0)


def _causes(waiting: Mapping[int, Operation], blockers: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks that others wait for and that do not wait themselves."""
    return tuple(sorted({other for found in blockers.values() for other in found if other not in waiting}))


# Mismatches -----------------------------------------------------------------------------------------------------------


def _mismatch(
    waiting: Mapping[int, Operation], blockers: Mapping[int, tuple[int, ...]], states: Mapping[int, RankState]
) -> Mismatch | None:
    for group in dict.fromkeys(operation.group for operation in waiting.values() if operation.peer is None):
        if (found := first_mismatch(states, group)) is not None:
            return found
    for rank, operation in waiting.items():
        if operation.peer is not None and (found := _mismatch_at_peer(rank, operation, states)) is not None:
            return found
    for rank, operation in waiting.items():
        # A late rank may still issue the operation. A rank that has gone on will not.
        if operation.peer is None and any(_has_gone_on(states[other], operation) for other in blockers[rank]):
            if (found := skipped(states, operation.group)) is not None:
                return found
    return None


def _has_gone_on(state: RankState, operation: Operation) -> bool:
    return state.idle or (state.waits is not None and state.waits.group != operation.group)


def _mismatch_at_peer(rank: int, operation: Operation, states: Mapping[int, RankState]) -> Mismatch | None:
    """Return the mismatch if the peer issued its end of `rank`'s message, but with other properties; else None."""
    other, peer = states.get(operation.peer or 0), operation.peer
    log = other.log(operation.group) if other is not None else None
    if log is None or peer is None:
        return None
    opposite = "recv" if operation.op == "send" else "send"
    met = next(
        (each for each in log.messages if (each.op, each.peer, each.number) == (opposite, rank, operation.number)), None
    )
    if met is None:
        return None
    if operation.op == "send":
        return message_mismatch(operation, met, rank, peer)
    return message_mismatch(met, operation, peer, rank)


# Words ----------------------------------------------------------------------------------------------------------------


def _sentence(clauses: Iterable[str]) -> str:
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}."


def _wait_clauses(waiting: Mapping[int, Operation]) -> list[str]:
    """Return a clause for each operation in which ranks wait, with the lines of code."""
    together: dict[tuple[object, ...], list[int]] = {}
    for rank, operation in waiting.items():
        together.setdefault((operation.name, operation.group, operation.peer), []).append(rank)
    clauses = []
    for ranks in list(together.values())[:_CLAUSES]:
        first = waiting[ranks[0]]
        longest = max(waiting[rank].seconds for rank in ranks)
        lines = dict.fromkeys(str(line) for rank in ranks if (line := waiting[rank].line) is not None)
        where = f" ({', '.join(lines)})" if lines else ""
        since = f" since {text_of(longest)}" if longest else ""
        clauses.append(f"{_subject(ranks)} {_verb(ranks, 'waits')} in {first.name}{since}{where}")
    if len(together) > _CLAUSES:
        clauses.append(f"others wait in {len(together) - _CLAUSES} more operations")
    return clauses


def _activity_clauses(
    ranks: Iterable[int], states: Mapping[int, RankState], waiting: Mapping[int, Operation]
) -> list[str]:
    """Return a clause for each activity of the ranks. waiting: operations in which others wait for them."""
    together: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        doing = states[rank].is_doing()
        if states[rank].idle and waiting:
            doing += f" without {_awaited_part(rank, waiting)}"
        together.setdefault(doing, []).append(rank)
    return [f"{_subject(found)} {_verb(found, doing)}" for doing, found in together.items()]


def at_work(states: Mapping[int, RankState], ranks: Iterable[int]) -> str:
    """Return these ranks' activities in one line: "rank 0 waits in all_reduce; ranks 1-3 run cell 4 line 7"."""
    clauses = _activity_clauses([rank for rank in ranks if rank in states], states, {})
    more = f"; {len(clauses) - _CLAUSES} more groups of ranks" if len(clauses) > _CLAUSES else ""
    return "; ".join(clauses[:_CLAUSES]) + more


def _awaited_part(rank: int, waiting: Mapping[int, Operation]) -> str:
    """Return words after "without": what others need from a rank (its part of a collective, a send or receive)."""
    for operation in waiting.values():
        if operation.peer == rank:
            return "receiving it" if operation.op == "send" else "sending it"
    return "it"


def _split_model_sentence(states: Mapping[int, RankState]) -> str:
    """Return an extra sentence if only some of the ranks call a model that is split over all of them; else ""."""
    activities = [state.activity for state in states.values() if state.activity is not None]
    calling = next((each for each in activities if each.split_call is not None), None)
    are_past = any(each.cell is None or (each.waits and each.split_call is None) for each in activities)
    if calling is None or not are_past:
        return ""
    line = calling.split_call
    assert line is not None
    return (
        f" The model is split over the ranks ({calling.split_by}), so all of them have to call {line.calls or 'it'}:"
        f" {line} has to run on every rank, without `if rank == 0`. Under ddp each rank has the whole model."
    )


def _mismatch_sentence(mismatch: Mismatch, waiting: Mapping[int, Operation]) -> str:
    """Return a sentence about what differs, and which ranks wait in other operations."""
    ends = {(operation.op, operation.group, operation.number) for operation, _ in mismatch.sides}
    others = {r: each for r, each in waiting.items() if (each.op, each.group, each.number) not in ends}
    here = [each.seconds for rank, each in waiting.items() if rank not in others]
    since = [f"{'the others wait' if others else 'they wait'} since {text_of(max(here))}"] if here else []
    return _sentence([_difference(mismatch), *_wait_clauses(others), *since])


def _difference(mismatch: Mismatch) -> str:
    first = mismatch.sides[0][0]
    if mismatch.missing:
        where = f" ({first.line})" if first.line else ""
        ranks = _subject(mismatch.missing)
        return f"{ranks} {_verb(mismatch.missing, 'has')} left out {first.name}{where}"
    sides = ", ".join(f"{_as_issued(operation)} on {_subject(ranks)}" for operation, ranks in mismatch.sides)
    if first.peer is not None:
        sender, receiver = mismatch.sides[0][1][0], mismatch.sides[1][1][0]
        return f"message #{first.number} from rank {sender} to rank {receiver} differs in {mismatch.what}: {sides}"
    return f"collective #{first.number} on {first.where} differs in {mismatch.what}: {sides}"


def _as_issued(operation: Operation) -> str:
    size = f" of {operation.bytes:,} bytes {operation.dtype}" if operation.dtype else ""
    size += "" if operation.peer is None else f" with tag {operation.tag}"
    size += "" if operation.root is None else f", root {operation.root}"
    return f"{operation.op}{size}" + (f" ({operation.line})" if operation.line else "")


def _subject(ranks: Sequence[int]) -> str:
    return ranks_named(list(ranks)).lower()


_PLURALS = {"waits": "wait", "is": "are", "has": "have", "reads": "read", "runs": "run", "does": "do", "keeps": "keep"}


def _verb(ranks: Sequence[int], words: str) -> str:
    """Return `words`, which begin with a verb, in the singular or plural form."""
    verb, space, rest = words.partition(" ")
    if len(ranks) > 1:
        verb = _PLURALS.get(verb, verb)
        rest = rest.replace("its cell", "their cell")
    return f"{verb}{space}{rest}"


COLUMNS = ("rank", "does", "operation", "ranks of the group", "bytes", "since", "line")


@dataclass(frozen=True)
class Why:
    """The states of all ranks at one moment, and the conclusion. seconds: the duration of the inspection."""

    states: Mapping[int, RankState]
    verdict: HangVerdict
    seconds: float

    @property
    def sentence(self) -> str:
        """Return the conclusion in one sentence."""
        return self.verdict.sentence

    def as_json(self) -> dict[str, Any]:
        """Return {"sentence", "kind", "stuck", "ranks", "seconds", "table": [...]}.

        sentence, kind, stuck, ranks: see HangVerdict. An element of table has the table's columns as texts, "stacks"
        ("" without --stacks), and "recorded": the unfinished operations in torch's flight recorder.
        """
        rows = [
            dict(zip(COLUMNS, _row(state), strict=True))
            | {"stacks": state.stacks, "recorded": list(state.activity.unfinished) if state.activity else []}
            for state in self.states.values()
        ]
        told = {name: getattr(self.verdict, name) for name in ("sentence", "kind", "stuck", "ranks")}
        return {**told, "seconds": self.seconds, "table": rows}

    def _rows(self) -> list[tuple[str, ...]]:
        return [_row(state) for state in self.states.values()]

    def _stacks(self) -> str:
        return "\n".join(f"rank {rank}, {state.stacks}" for rank, state in self.states.items() if state.stacks)

    def _recorded(self) -> str:
        """Return the unfinished operations in torch's flight recorders."""
        found = {rank: state.activity.unfinished for rank, state in self.states.items() if state.activity is not None}
        return "\n".join(f"rank {rank}, flight recorder: {one}" for rank, some in found.items() for one in some)

    def __repr__(self) -> str:
        table = text_table(COLUMNS, self._rows())
        return "\n\n".join(part for part in (self.sentence, table, self._recorded(), self._stacks()) if part)

    def _repr_html_(self) -> str:
        details = "\n\n".join(part for part in (self._recorded(), self._stacks()) if part)
        stacks = f"<pre>{html.escape(details)}</pre>" if details else ""
        return f"<b>{html.escape(self.sentence)}</b>{html_table(COLUMNS, self._rows())}{stacks}"


def ask_why(entry: ClusterEntry, client: Client, deaths: Mapping[int, Death], *, stacks: bool = False) -> Why:
    """Inspect all ranks of a cluster. Returns within 5 s. stacks: include the stack of every thread."""
    began = time.monotonic()
    states = collect(entry, client, deaths, stacks=stacks)
    return Why(states, verdict(states), time.monotonic() - began)


def _row(state: RankState) -> tuple[str, ...]:
    activity, operation = state.activity, state.waits
    line = operation.line if operation is not None and operation.line is not None else state.line
    told = _operation_cells(operation) if operation is not None else ("", "", "", "")
    where = f"{line}{f', in {line.calls}' if line.calls else ''}" if line else ""
    if state.kind != "answers" or activity is None:
        does = state.how.removeprefix("is ")
    elif state.prompt:
        does = "at a prompt"
    elif state.idle:
        does, where = "idle", ""
    elif operation is not None:
        does = "waits on its device" if activity.on_device else "waits"
    elif activity.reads_data:
        does = "reads data"
    else:
        does = f"trains, step {activity.step}" if activity.step is not None else "runs"
    return (str(state.rank), does, *told, where)


def _operation_cells(operation: Operation) -> tuple[str, ...]:
    size = f"{operation.bytes:,} {operation.dtype}".strip() if operation.dtype else ""
    members = ",".join(map(str, operation.members[:8])) + (",…" if len(operation.members) > 8 else "")
    return operation.name, members, size, text_of(operation.seconds) if operation.seconds else ""


QUIET_SECONDS = 30.0
_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 2.0


class QuietWatch:
    """A watch on one cell that reports a possible hang.

    If no rank issues an operation, makes a step or shows output for QUIET_SECONDS, the ranks are inspected in a thread
    of their own. The watch reports only if a rank is stuck, because a long computation on all ranks is not a hang. It
    reports once until something moves again. Its other methods run on the client's thread.
    """

    def __init__(self, entry: ClusterEntry, client: Client, deaths: Mapping[int, Death], execution: Execution) -> None:
        self.entry, self.client, self.deaths, self.execution = entry, client, deaths, execution
        self.moved: dict[int, Any] = {}
        self.shown = dict(execution.arrived)
        self.since, self.spoken = time.monotonic(), False

    def begin(self) -> None:
        """Check every few seconds until the cell has ended. Call this on the client's thread."""
        self.client.later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.execution.done.done():
            return
        self.begin()  # scheduled first, to go on after a failure
        replies = self.client.request(self.execution.request.ranks, GetProgress())
        self.client.later(_ANSWER_SECONDS, self._compare, replies)

    def _compare(self, replies: Mapping[int, Future[Any]]) -> None:
        # A rank that does not answer counts as not moving.
        answered = {rank: reply for rank, reply in replies.items() if reply.done() and not reply.exception()}
        moved = {rank: reply.result()["content"].get("moved") for rank, reply in answered.items()}
        moved, shown = {**self.moved, **moved}, dict(self.execution.arrived)
        if (moved, shown) != (self.moved, self.shown):
            self.moved, self.shown, self.since, self.spoken = moved, shown, time.monotonic(), False
        elif not self.spoken and time.monotonic() - self.since >= QUIET_SECONDS:
            self.spoken = True
            threading.Thread(target=self._speak, name="nbkit-why", daemon=True).start()

    def _speak(self) -> None:
        why = ask_why(self.entry, self.client, self.deaths)
        if why.verdict.stuck and self.execution.stop is None and not self.execution.done.done():
            text = f"Nothing has moved for {QUIET_SECONDS:.0f} s. {why.sentence} {self._more()}"
            self.client.soon(self.execution.say, text)

    def _more(self) -> str:
        """Return how the user gets details: in a terminal, if the kernel is busy because it waits for the cell."""
        return "→ %nbkit why" if self.execution.request.detached else f"→ nbkit why {self.entry.name}   in a terminal"
