"""One sentence from what all ranks do: who waits in what, and who keeps them waiting. Pure: states in, words out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nbkit.durations import text_of
from nbkit.notebook.cluster.why.mismatch import Mismatch, first_mismatch, message_mismatch, skipped
from nbkit.notebook.cluster.why.rank_state import RankState
from nbkit.wire.activity import ANYONE, Operation
from nbkit.wire.cells import ranks_named

Kind = Literal["mismatch", "late", "circle", "held", "prompt", "free"]
_UNDER_WAY_SECONDS = 5.0  # what all ranks have come to takes less
_CLAUSES = 4  # of a sentence, about ranks that wait in different things


@dataclass(frozen=True)
class Verdict:
    """kind: "mismatch": ranks have not issued the same; "late": some wait for others, who do not wait; "circle": they
    wait for each other; "held": nobody waits for a rank, but one is stopped or answers nothing; "prompt": some wait for
    a rank at which a person types, and nothing is wrong; "free": none of these.

    ranks: those that are the cause.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()

    @property
    def stuck(self) -> bool:
        """Whether a rank waits for another, or is held, and no person is at it."""
        return self.kind not in ("free", "prompt")


def verdict(states: Mapping[int, RankState]) -> Verdict:
    """What it comes to. states: of all ranks."""
    found = _found(states)
    return replace(found, sentence=found.sentence + _of_split_model(states)) if found.stuck else found


def _found(states: Mapping[int, RankState]) -> Verdict:
    waiting = {rank: state.waits for rank, state in sorted(states.items()) if state.waits is not None}
    if not waiting:
        return _nobody_waits(states)
    blockers = {rank: _blockers(rank, operation, states) for rank, operation in waiting.items()}
    if (mismatch := _mismatch(waiting, blockers, states)) is not None:
        return Verdict("mismatch", _of_mismatch(mismatch, waiting), mismatch.odd)
    causes = _causes(waiting, blockers)
    if causes:
        kind: Kind = "prompt" if all(states[rank].prompt for rank in causes) else "late"
        return Verdict(kind, _sentence([*_waits(waiting), *_doings(causes, states, waiting)]), causes)
    if all(blockers.values()):
        ending = "each waits for another one of them"
        if len({operation.group for operation in waiting.values() if operation.peer is None}) > 1:
            ending += ", for they do not issue these in the same order"
        return Verdict("circle", f"{_sentence(_waits(waiting))[:-1]}: {ending}.", tuple(waiting))
    # Whoever waits for ranks that wait has them for a cause.
    first = {rank: operation for rank, operation in waiting.items() if not blockers[rank]}
    long = max(operation.seconds for operation in first.values()) > _UNDER_WAY_SECONDS
    under_way = "all ranks of it have come: it is under way" + (", or the network holds it" if long else "")
    return Verdict("held" if long else "free", _sentence([*_waits(waiting), under_way]))


def _nobody_waits(states: Mapping[int, RankState]) -> Verdict:
    held = tuple(rank for rank, state in sorted(states.items()) if state.kind != "answers")
    if all(state.idle for state in states.values()):
        return Verdict("free", "No cell runs.")
    readers = tuple(
        rank for rank, state in sorted(states.items()) if state.activity is not None and state.activity.reads_data
    )
    return Verdict("held" if held else "free", _sentence(_doings(states, states, {})), held or readers)


# Who waits for whom ---------------------------------------------------------------------------------------------------


def _blockers(rank: int, operation: Operation, states: Mapping[int, RankState]) -> tuple[int, ...]:
    """The ranks that have not come to the operation in which `rank` waits."""
    others = [other for other in operation.members if other != rank and other in states]
    if not operation.group:  # of all ranks, and no collective: to make a group, or to come together for a fit
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
    """How many messages the other rank has issued at the other end of such an operation of `rank`."""
    log = state.log(operation.group) if state is not None else None
    if log is None:
        return 0
    if operation.op == "send":  # whoever takes from anyone may have taken this one
        return log.received.get(rank, 0) + log.received.get(ANYONE, 0)
    return log.sent.get(rank, 0)


def _causes(waiting: Mapping[int, Operation], blockers: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks that somebody waits for, and that wait for nobody: nothing goes on before they do."""
    return tuple(sorted({other for found in blockers.values() for other in found if other not in waiting}))


# Mismatches -----------------------------------------------------------------------------------------------------------


def _mismatch(
    waiting: Mapping[int, Operation], blockers: Mapping[int, tuple[int, ...]], states: Mapping[int, RankState]
) -> Mismatch | None:
    for group in dict.fromkeys(operation.group for operation in waiting.values() if operation.peer is None):
        if (found := first_mismatch(states, group)) is not None:
            return found
    for rank, operation in waiting.items():
        if operation.peer is not None and (found := _of_message(rank, operation, states)) is not None:
            return found
    for rank, operation in waiting.items():
        # Whoever is late and on the way may still come to it; one that has gone on does not.
        if operation.peer is None and any(_has_gone_on(states[other], operation) for other in blockers[rank]):
            if (found := skipped(states, operation.group)) is not None:
                return found
    return None


def _has_gone_on(state: RankState, operation: Operation) -> bool:
    return state.idle or (state.waits is not None and state.waits.group != operation.group)


def _of_message(rank: int, operation: Operation, states: Mapping[int, RankState]) -> Mismatch | None:
    """Whether the other end of a message that `rank` waits in has been issued, and is another one."""
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


def _waits(waiting: Mapping[int, Operation]) -> list[str]:
    """A clause for each operation that ranks wait in, with the line if it is one for all of them."""
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


def _doings(ranks: Iterable[int], states: Mapping[int, RankState], waiting: Mapping[int, Operation]) -> list[str]:
    """A clause for each thing that ranks do. waiting: what others wait in for them."""
    together: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        doing = states[rank].is_doing()
        if states[rank].idle and waiting:
            doing += f" without {_owed(rank, waiting)}"
        together.setdefault(doing, []).append(rank)
    return [f"{_subject(found)} {_verb(found, doing)}" for doing, found in together.items()]


def _owed(rank: int, waiting: Mapping[int, Operation]) -> str:
    """What others wait for from a rank: its part of a collective, or the other end of a message."""
    for operation in waiting.values():
        if operation.peer == rank:
            return "receiving it" if operation.op == "send" else "sending it"
    return "it"


def _of_split_model(states: Mapping[int, RankState]) -> str:
    """A sentence more, where some ranks call a model of which all have a part, and others are past it; else ""."""
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


def _of_mismatch(mismatch: Mismatch, waiting: Mapping[int, Operation]) -> str:
    """What differs, and who waits in something else than that."""
    ends = {(operation.op, operation.group, operation.number) for operation, _ in mismatch.sides}
    others = {r: each for r, each in waiting.items() if (each.op, each.group, each.number) not in ends}
    here = [each.seconds for rank, each in waiting.items() if rank not in others]
    since = [f"{'the others wait' if others else 'they wait'} since {text_of(max(here))}"] if here else []
    return _sentence([_difference(mismatch), *_waits(others), *since])


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
    """`words`, which begin with a verb, for one rank or for several."""
    verb, space, rest = words.partition(" ")
    if len(ranks) > 1:
        verb = _PLURALS.get(verb, verb)
        rest = rest.replace("its cell", "their cell")
    return f"{verb}{space}{rest}"
