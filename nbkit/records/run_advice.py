"""Find what costs a step the most, from the bars of all ranks; one sentence on it with what one could try.

The delay of each link between two ranks of a pipeline, from one detailed step of all its ranks.

A message is on its way from when it has been sent, and its receiver stands still for it from when it has begun to wait:
the later of the two until it is there is transfer that hides behind nothing. What the receiver waited before was
idleness in the schedule.

Finds the ranks that are behind, from their fingerprints (`groups.fingerprint`). Pure: no torch, any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbkit.records.readings import MESSAGES, Bar, Late, TrafficRow, late_rank
from nbkit.records.records import Detail, TimedCall

_TIMES_THE_REST = 3.0


@dataclass(frozen=True)
class PipelineLink:
    """Messages of one step from one rank to another. seconds: that the receiver stood still for transfers."""

    source: int
    target: int
    messages: int
    bytes: int
    seconds: float


def links(details: Mapping[int, Detail], offsets: Mapping[int, int] | None = None) -> list[PipelineLink]:
    """Return each direction of each pair of ranks between which messages went, the longest stood for first.

    offsets: ns to add to a rank's times to get rank 0's (Header.offset_ns); default: all share a clock.
    Messages of which one end is not in the records, or for which nobody waited, are left out.
    """
    shift = offsets or {}
    sent = {(rank, *key): call for rank, one in details.items() for key, call in _messages(one.calls, "send")}
    sums: dict[tuple[int, int], list[float]] = {}
    for target, one in details.items():
        for (source, group, place), arrived in _messages(one.calls, "recv"):
            issued = sent.get((source, target, group, place))
            if issued is None or arrived.waited is None:
                continue
            # Where nobody knows when it was there, it was when the wait was over, or before.
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
    """The link that takes `at_least` of a step of `step` seconds, and several times what the next one takes.

    The next one is between two other ranks, since what slows a link mostly slows both of its directions. Where there
    are only two ranks it is the other direction.
    """
    every = sorted(of, key=lambda link: -link.seconds)
    # One that takes longer than the step has its moments from another step, which was slower.
    if not every or not at_least * step < every[0].seconds < step:
        return None
    ends = {every[0].source, every[0].target}
    others = [link for link in every[1:] if {link.source, link.target} != ends] or every[1:]
    usual = others[0].seconds if others else 0.0
    return every[0] if every[0].seconds >= _TIMES_THE_REST * usual else None


def _messages(calls: Iterable[TimedCall], op: str) -> Iterable[tuple[tuple[int, str, int], TimedCall]]:
    """((rank at the other end, group, number in the pair), call) of each message."""
    for call in calls:
        if call.op == op and call.peer is not None and call.peer >= 0:
            yield (call.peer, call.group, call.place), call


_AT_LEAST = 0.1  # of a step, for a part to be worth a word
_NAMED = 3  # ranks; more are counted
_SHARED = ("exposed", "bubble", "data", "optimizer", "other")


def largest_loss(of: Sequence[Bar], *, slow: PipelineLink | None = None) -> PipelineLink | Late | str:
    """A slow link (see links.slow_link), a late rank, or the part of the step that takes the most beside compute;
    "compute" where none takes much.

    Neither rank nor link is named for a little where every rank, were it not for them, would still lose more to one and
    the same part: of a pipeline's bubble the rank that is late has what remains without its lateness.
    """
    if not of:
        return "compute"
    late = late_rank(of)
    least = {part: min(getattr(bar, part) for bar in of) for part in _SHARED}
    if slow is not None and (late is None or slow.seconds > late.seconds):
        for_it = dict.fromkeys(("bubble", "exposed"), slow.seconds)  # where standing still for a link shows
        if slow.seconds >= max(seconds - for_it.get(part, 0.0) for part, seconds in least.items()):
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
    """One sentence on where the step goes, and what one could try. "" without bars.

    slow: see links.slow_link. alike: ranks of one stage have equal shares of the work. What it says of a late rank are
    lengths of parts in these bars, and their difference.
    """
    whole = sum(bar.seconds for bar in of)
    if whole <= 0:
        return ""
    step, loss = whole / len(of), largest_loss(of, slow=slow)
    if isinstance(loss, PipelineLink):
        return (
            f"Messages from rank {loss.source} to rank {loss.target} hold the pipeline up for "
            f"{loss.seconds * 1e3:.0f} ms of each step ({loss.seconds / step:.0%}): {_CAUSES['exposed']}"
        )
    if isinstance(loss, Late):
        ranks = (loss.rank, *loss.beside)
        who = f"ranks {', '.join(map(str, sorted(ranks)))}" if loss.beside else f"rank {loss.rank}"
        others = "The others wait" if len(of) > 2 else "The other rank waits"
        return f"{others} for {who}, {_why(loss, step) if alike else _plain(loss, step)}"
    share = sum(getattr(bar, loss) for bar in of) / whole
    if loss == "compute":
        return f"{share:.0%} of the step is compute."
    what, advice = _SPOKEN[loss], _ADVICE[loss]
    moved = [row for row in rows if row.op not in MESSAGES and row.bytes]
    if loss == "exposed" and moved:
        longest = max(moved, key=lambda row: row.blocked)  # what is hidden behind compute is not what costs
        what = f"exposed {longest.op.replace('_', '-')} on {longest.axis}"
        advice = _EXPOSED.get(longest.axis, advice)
    return f"{share:.0%} of the step is {what}: {advice}"


def _plain(late: Late, step: float) -> str:
    return f"{_LONGER[late.cause]} ({_beside_others(late, step)}): {_CAUSES[late.cause]}"


def _why(late: Late, step: float) -> str:
    """Return what makes its compute long is told by the ranks that have the same share of the work."""
    if late.cause != "compute" or not late.twins:
        return _plain(late, step)
    several = len(late.twins) > 1
    twins = f"rank{'s' * several} {', '.join(map(str, late.twins))}" if len(late.twins) <= _NAMED else ""
    twins = twins or f"its {len(late.twins)} equals"
    if late.alone:
        return (
            f"which computes {_spoken(late.took)} where {twins}, with the same share, compute{'s' * (not several)} "
            f"{_spoken(late.twins_took)} ({_more(late, step)}): look at what else runs on its machine, and at its "
            "clocks"
        )
    return (
        f"whose compute takes longer, as on {twins} with the same share ({_beside_others(late, step)}): "
        "the share is large, try balance=True"
    )


def _beside_others(late: Late, step: float) -> str:
    return f"{_spoken(late.took)}, elsewhere {_spoken(late.took - late.longer)}: {_more(late, step)}"


def _more(late: Late, step: float) -> str:
    return f"{_spoken(late.longer)} more, {late.longer / step:.0%} of the step"


def _spoken(seconds: float) -> str:
    """With the digits that bars have at their ends."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


_SPOKEN = {
    "exposed": "exposed communication",
    "waiting": "waiting for peers",
    "bubble": "pipeline bubble",
    "data": "waiting for data",
    "optimizer": "the optimizer",
    "other": "in none of the measured parts",
}
_LONGER = {
    "data": "whose waiting for data takes longer",
    "compute": "whose compute takes longer",
    "optimizer": "whose optimizer takes longer",
    "other": "which spends more time outside of the measured parts",
    "exposed": "whose exposed communication takes longer",
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
    "optimizer": "look at how evenly the parameters are split",
    "other": "look at what only this rank does",
    "exposed": "look at the link between them",
}


def differences(fingerprints: Sequence[Mapping[str, int]]) -> list[str]:
    """Return what does not match between the ranks' fingerprints (index == rank); empty when all is matched.

    A line per group whose members issued different numbers of collectives, and per pair of ranks with a send
    that nobody received, or the other way round.
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
    # A receive from "any" can take any pair's messages: such a destination is compared in total.
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
