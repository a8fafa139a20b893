"""How much of the all-gather of zero1 and zero2 the next forward hides: links and blocks that sleep, steps of `fit`."""

from __future__ import annotations

from bench.rigs.forked import Ranks
from bench.settings import Settings
from bench.stats import quantile
from bench.table import Row

BUCKET_S, BLOCK_S, BLOCKS = 0.005, 0.010, 16
STEPS, BAR = 12, 0.9


def run(settings: Settings) -> list[Row]:
    """A row for each; `again`: the same where somebody holds weights between two steps, so that nothing is hidden."""
    with Ranks("overlap.hidden_gather_ranks", 2, folder=settings.folder, blocks=BLOCKS, seconds=BLOCK_S) as ranks:
        return [_row(ranks, strategy, settings.count(STEPS)) for strategy in ("zero1", "zero2")]


def _row(ranks: Ranks, strategy: str, steps: int) -> Row:
    shown, samples = {}, {}
    for name, late in (("nbkit", True), ("again", False)):
        said = ranks.ask("steps", strategy=strategy, link=BUCKET_S, late=late, steps=steps)
        hidden = [1 - waited / sent for one in said for waited, sent in one["steps"]]
        shown[name], samples[name] = quantile(hidden, 0.5), hidden
    buckets = said[0]["buckets"]
    return Row(
        f"all-gather behind the next forward, {strategy}, {buckets} buckets of {BUCKET_S * 1e3:.0f} ms, "
        f"{BLOCK_S * 1e3:.0f} ms of forward for each",
        f"{shown['nbkit'].middle:.1%} hidden",
        "",
        "",
        f"with a callback {shown['again'].middle:.1%}",
        f"≥ {BAR:.0%}",
        shown["nbkit"].middle >= BAR,
        samples,
    )
