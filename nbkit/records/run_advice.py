"""Find what costs a step the most, from the bars of all ranks; one sentence on it with what one could try."""

from __future__ import annotations

from collections.abc import Sequence

from nbkit.records.late_ranks import Bar, Late, late_rank
from nbkit.records.pipeline_links import Link
from nbkit.records.readings import MESSAGES, Row

_AT_LEAST = 0.1  # of a step, for a part to be worth a word
_NAMED = 3  # ranks; more are counted
_SHARED = ("exposed", "bubble", "data", "optimizer", "other")


def largest_loss(of: Sequence[Bar], *, slow: Link | None = None) -> Link | Late | str:
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
    rows: Sequence[Row] = (),
    *,
    slow: Link | None = None,
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
    if isinstance(loss, Link):
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
    """What makes its compute long is told by the ranks that have the same share of the work."""
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
