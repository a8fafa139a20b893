"""Finds what costs the most time of a step, from the records of all ranks, without torch.

`largest_loss` finds it from the bars of all ranks, and `reading` makes a sentence of it, with advice.

`links` returns the delay of each link between two ranks of a pipeline, from one detailed step of all ranks. After a
message was sent and its receiver has begun to wait, the rest of the transfer is not hidden by other work. An earlier
wait of the receiver, before the message was sent, is idle time of the schedule.

`differences` finds ranks that are behind, from their fingerprints (`delegating_group.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nbkit.figures import seconds as spoken
from nbkit.records.readings import MESSAGES, Bar, Late, TrafficRow, faults_take, late_rank
from nbkit.records.records import Detail, TimedCall

_TIMES_THE_REST = 3.0


@dataclass(frozen=True)
class PipelineLink:
    """The messages of a step from one rank to another. seconds: for which the receiver was idle during transfers."""

    source: int
    target: int
    messages: int
    bytes: int
    seconds: float


def links(details: Mapping[int, Detail], offsets: Mapping[int, int] | None = None) -> list[PipelineLink]:
    """Return the links that have messages, one for each direction, the link with the longest delay first.

    offsets: ns to add to a rank's times to get rank 0's (Header.offset_ns); default: all ranks share a clock. Messages
    are left out if one end is not in the records, or if no rank waited for them.
    """
    shift = offsets or {}
    sent = {(rank, *key): call for rank, one in details.items() for key, call in _messages(one.calls, "send")}
    sums: dict[tuple[int, int], list[float]] = {}
    for target, one in details.items():
        for (source, group, place), arrived in _messages(one.calls, "recv"):
            issued = sent.get((source, target, group, place))
            if issued is None or arrived.waited is None:
                continue
            # If the arrival was not recorded, it was at the end of the wait or earlier.
            done = arrived.done if arrived.done is not None else arrived.waited + arrived.blocked
            left = issued.issued + shift.get(source, 0)
            here = shift.get(target, 0)
            stood = min(done + here - max(left, arrived.waited + here), arrived.blocked)
            into = sums.setdefault((source, target), [0, 0, 0.0])
            into[0] += 1
            into[1] += arrived.bytes
            into[2] += max(stood, 0) / 1e9
    made = [PipelineLink(a, b, int(count), int(size), seconds) for (a, b), (count, size, seconds) in sums.items()]
    return sorted(made, key=lambda link: -link.seconds)


def slow_link(of: Iterable[PipelineLink], step: float, *, at_least: float = 0.05) -> PipelineLink | None:
    """Return the slowest link if it takes a share `at_least` of a step, and several times as long as the next one.

    The next one is between two other ranks, since a slow link is usually slow in both directions. With only two ranks
    it is the other direction. step: seconds of a step.
    """
    every = sorted(of, key=lambda link: -link.seconds)
    # A link that takes longer than a whole step was measured in another, slower step.
    if not every or not at_least * step < every[0].seconds < step:
        return None
    ends = {every[0].source, every[0].target}
    others = [link for link in every[1:] if {link.source, link.target} != ends] or every[1:]
    usual = others[0].seconds if others else 0.0
    return every[0] if every[0].seconds >= _TIMES_THE_REST * usual else None


def _messages(calls: Iterable[TimedCall], op: str) -> Iterable[tuple[tuple[int, str, int], TimedCall]]:
    """Yield ((rank at the other end, group, number in the pair), call) for each message."""
    for call in calls:
        if call.op == op and call.peer is not None and call.peer >= 0:
            yield (call.peer, call.group, call.place), call


_AT_LEAST = 0.1  # the share of a step from which a part is mentioned
_NAMED = 3  # up to this number, ranks are named; more are only counted
_SHARED = ("exposed", "bubble", "data", "optimizer", "other")


def largest_loss(of: Sequence[Bar], *, slow: PipelineLink | None = None) -> PipelineLink | Late | str:
    """Return what costs the most time: a slow link (see `slow_link`), a late rank, or a part of the step.

    The part is the one that takes the most time besides compute, or "compute" if none takes much. A rank or link is not
    returned if every rank loses more time to one part anyway. The late rank itself shows this: it waits for no late
    rank, so its bubble would remain.
    """
    if not of:
        return "compute"
    late = late_rank(of)
    least = {part: min(getattr(bar, part) for bar in of) for part in _SHARED}
    if slow is not None and (late is None or slow.seconds > late.seconds):
        for_it = dict.fromkeys(("bubble", "exposed"), slow.seconds)  # the wait for a slow link is in these parts
        # Only some ranks may have a bubble. The average is the loss of the pipeline.
        lost = least | {"bubble": fmean(bar.bubble for bar in of)}
        if slow.seconds >= max(seconds - for_it.get(part, 0.0) for part, seconds in lost.items()):
            return slow
    if late is not None and late.seconds >= max(least.values()):
        return late
    sums = {part: sum(getattr(bar, part) for bar in of) for part in _ADVICE}
    worst = max(sums, key=lambda part: sums[part])
    return worst if sums[worst] >= _AT_LEAST * sum(bar.seconds for bar in of) else "compute"


def reading(
    of: Sequence[Bar],
    rows: Sequence[TrafficRow] = (),
    *,
    slow: PipelineLink | None = None,
    alike: bool = True,
) -> str:
    """Return a sentence that says what takes the time of a step, and what to try. "" without bars.

    slow: see `slow_link`. alike: True if ranks of one stage have equal shares of the work. For a late rank, the numbers
    are lengths of parts in these bars, and their difference.
    """
    whole = sum(bar.seconds for bar in of)
    if whole <= 0:
        return ""
    step, loss = whole / len(of), largest_loss(of, slow=slow)
    if isinstance(loss, PipelineLink):
        return (
            f"Messages from rank {loss.source} to rank {loss.target} hold the pipeline up for "
            f"{spoken(loss.seconds)} of each step ({loss.seconds / step:.0%}): {_CAUSES['exposed']}"
        )
    if isinstance(loss, Late):
        if loss.by_nbkit:
            took = f"{spoken(loss.longer)} of each step ({loss.longer / step:.0%})"
            return f"nbkit examines strategies for the panel on rank {loss.rank}. That takes {took} and ends by itself."
        ranks = (loss.rank, *loss.beside)
        who = f"ranks {', '.join(map(str, sorted(ranks)))}" if loss.beside else f"rank {loss.rank}"
        others = "The others wait" if len(of) > 2 else "The other rank waits"
        if loss.by_disk:
            return f"{others} for {who}. It takes {_more(loss, step)}. {_from_disk(loss.faults)}"
        return f"{others} for {who}. {_why(loss, step) if alike else _plain(loss, step)}"
    share = sum(getattr(bar, loss) for bar in of) / whole
    if loss == "compute":
        faults = fmean(bar.faults for bar in of)
        if faults_take(faults) >= _AT_LEAST * step:
            return f"{share:.0%} of the step is compute, and waiting for memory. {_from_disk(faults)}"
        return f"{share:.0%} of the step is compute."
    what, advice = _SPOKEN[loss], _ADVICE[loss]
    moved = [row for row in rows if row.op not in MESSAGES and row.bytes]
    if loss == "exposed" and moved:
        longest = max(moved, key=lambda row: row.blocked)  # time that compute hides costs nothing
        what = f"exposed {longest.op.replace('_', '-')} on {longest.axis}"
        advice = _EXPOSED.get(longest.axis, advice)
    return f"{share:.0%} of the step is {what}: {advice}"


def _from_disk(faults: float) -> str:
    return (
        f"In each step the system reads {faults:,.0f} pages of its memory back from disk: the machine is short of "
        "memory, so end other programs, or use a smaller micro-batch"
    )


def _plain(late: Late, step: float) -> str:
    return f"{_LONGER[late.cause]} ({_beside_others(late, step)}): {_CAUSES[late.cause]}"


def _why(late: Late, step: float) -> str:
    """Return why a rank is late. A comparison with ranks that have the same work tells why its compute is long."""
    if late.cause != "compute" or not late.twins:
        return _plain(late, step)
    several = len(late.twins) > 1
    twins = f"rank{'s' * several} {', '.join(map(str, late.twins))}" if len(late.twins) <= _NAMED else ""
    twins = twins or f"its {len(late.twins)} equals"
    if late.alone:
        return (
            f"It computes for {spoken(late.took)}; {twins}, with the same share, need{'s' * (not several)} "
            f"{spoken(late.twins_took)} ({_more(late, step)}): look at what else runs on its machine, and at its "
            "clocks"
        )
    return (
        f"Compute takes longer there, and on {twins} with the same share ({_beside_others(late, step)}): "
        "the share is large, try recovery=nbkit.Recovery(balance=True)"
    )


def _beside_others(late: Late, step: float) -> str:
    return f"{spoken(late.took)}, elsewhere {spoken(late.elsewhere)}: {_more(late, step)}"


def _more(late: Late, step: float) -> str:
    return f"{spoken(late.longer)} more, {late.longer / step:.0%} of the step"


_SPOKEN = {
    "exposed": "exposed communication",
    "waiting": "waiting for peers",
    "bubble": "pipeline bubble",
    "data": "waiting for data",
    "optimizer": "the optimizer",
    "other": "outside of the measured parts",
}
_LONGER = {
    "data": "The loader takes longer there",
    "compute": "Compute takes longer there",
    "optimizer": "The optimizer takes longer there",
    "other": "More time passes there outside of the measured parts",
    "exposed": "Exposed communication takes longer there",
}
_ADVICE = {
    "exposed": "try a larger micro-batch",
    "waiting": "the ranks are late in turns: look at what else runs on these machines",
    "bubble": "try more micro-batches, or schedule=zbv",
    "data": "try more loader workers",
    "optimizer": "try a fused optimizer, or zero1",
    "other": "look at callbacks and logging",
}
_EXPOSED = {
    "dp": "try zero1 or a larger micro-batch",
    "shard": "try hsdp, or a larger micro-batch",
    "tp": "try a smaller tp",
    "cp": "try a smaller cp",
}
_CAUSES = {
    "data": "look at its loader",
    "compute": "look at what else runs there, its clocks, and how evenly the work is split",
    "optimizer": "look at what else runs there, and how evenly the parameters are split",
    "other": "look at what only this rank does",
    "exposed": "look at the link between them",
}


def differences(fingerprints: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the differences between the ranks' fingerprints (index == rank); empty if all match.

    There is a line for each group whose members issued different numbers of collectives, and for each pair of ranks
    with a send that was not received, or a receive without a send.
    """
    lines = []
    transfers: dict[str, dict[str, int]] = {"sent": {}, "received": {}}
    collectives: dict[str, dict[int, int]] = {}
    for rank, counts in enumerate(fingerprints):
        for key, number in counts.items():
            kind = key.rsplit(" ", 1)[-1]
            if kind in transfers and "->" in key:
                transfers[kind][key.removesuffix(f" {kind}")] = number
            else:
                collectives.setdefault(key, {})[rank] = number
    for label, by_rank in sorted(collectives.items()):
        if len(set(by_rank.values())) > 1:
            lines.append(f"{label}: " + ", ".join(f"rank {rank} issued {n}" for rank, n in sorted(by_rank.items())))
    return lines + _unmatched(transfers["sent"], transfers["received"])


def _unmatched(sent: Mapping[str, int], received: Mapping[str, int]) -> list[str]:
    # A receive from "any" can take messages of any pair, so the totals of such a destination are compared.
    anyone = {key.replace("any->", "*->") for key in received if ": any->" in key}

    def totals(counts: Mapping[str, int]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for key, number in counts.items():
            label, pair = key.rsplit(": ", 1)
            total = f"{label}: *->{pair.split('->')[1]}"
            key = total if total in anyone else key
            sums[key] = sums.get(key, 0) + number
        return sums

    gone, come = totals(sent), totals(received)
    return [
        f"{key}: sent {gone.get(key, 0)}, received {come.get(key, 0)}"
        for key in sorted({*gone, *come})
        if gone.get(key, 0) != come.get(key, 0)
    ]
