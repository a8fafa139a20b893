"""Ask every rank what it does, and look from outside at those that do not answer; a few seconds, whatever they do."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as settle
from dataclasses import astuple, replace
from pathlib import PurePath
from typing import Any

from nbkit.notebook.cluster.cells.client import Client
from nbkit.notebook.cluster.output.root_cause import Death
from nbkit.notebook.cluster.registry import Entry
from nbkit.notebook.cluster.why.rank_state import RankState
from nbkit.wire import process_state
from nbkit.wire.activity import Activity, CodeLine
from nbkit.wire.process_state import ProcessState
from nbkit.wire.user_code import is_users

ANSWER_SECONDS = 1.0  # a free interpreter answers in milliseconds
LOOK_SECONDS = 1.0
LATE_SECONDS = 1.0  # for an answer that comes while one looks from outside


def collect(entry: Entry, client: Client, deaths: Mapping[int, Death], *, stacks: bool = False) -> dict[int, RankState]:
    """The state of each rank, from any thread. stacks: with the stack of every thread."""
    alive = [rank for rank in range(entry.n) if rank not in deaths]
    replies = client.request(alive, "why", stacks=stacks)
    settle(replies.values(), ANSWER_SECONDS)
    if silent := [rank for rank in alive if not _has_come(replies, rank)]:
        looks = looks_from_outside(entry, client, silent, [rank for rank in alive if rank not in silent])
        settle([replies[rank] for rank in silent if rank in replies and rank not in looks], LATE_SECONDS)
    else:
        looks = {}
    states = {rank: RankState(rank, "dead", f"is dead ({death.how})") for rank, death in deaths.items()}
    answers = {rank: _activity(replies[rank]) for rank in alive if _has_come(replies, rank)}
    cells = {PurePath(file).name: number for each in answers.values() for file, number in each.cells.items()}
    for rank in alive:
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


def _activity(reply: Future[Any]) -> Activity:
    found = pickle.loads(base64.b64decode(reply.result()["content"]["activity"]))
    assert isinstance(found, Activity)
    return found


def looks_from_outside(
    entry: Entry, client: Client, silent: Iterable[int], answering: list[int]
) -> dict[int, ProcessState]:
    """Of processes of this host directly, of others by a rank beside them that answers; none where they are unknown."""
    silent = [rank for rank in silent if rank < len(entry.ranks)]  # a cluster that is being started has none yet
    if entry.is_here and not entry.is_spread:
        logs = entry.folder / "logs"
        deadline = time.monotonic() + LOOK_SECONDS
        looks = {}
        for rank in silent:
            left = max(0.1, deadline - time.monotonic())
            if found := process_state.look(entry.ranks[rank], logs / f"rank{rank}.log", left):
                looks[rank] = found
        return looks
    processes = {str(rank): list(astuple(entry.ranks[rank])) for rank in silent}
    answers = client.ask(answering, "outside", 2 * LOOK_SECONDS, processes=processes)
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
